// From the model's output to an answer, as harness/tasks/ does it: a function per task, of the
// contract and the output of one text without padding, {data: Float32Array, dims}. numpy adds float32
// one after the other along the sequence, and so is it done here.

const SMALLEST_NORM = 1e-12;
const single = Math.fround;

/** Sum over the sequence of weight(i) times the hidden state of position i, over `divisor`. */
function weighted({ data, dims }, weight, divisor) {
  const [, length, width] = dims;
  const sum = new Float32Array(width);
  for (let i = 0; i < length; i++) {
    for (let j = 0; j < width; j++) sum[j] += single(data[i * width + j] * weight(i));
  }
  return sum.map((x) => x / single(divisor));
}

function largest({ data, dims }) {
  const [, length, width] = dims;
  const most = data.slice(0, width);
  for (let i = 1; i < length; i++) {
    for (let j = 0; j < width; j++) most[j] = Math.max(most[j], data[i * width + j]);
  }
  return most;
}

const row = ({ data, dims }, i) => data.slice(i * dims[2], (i + 1) * dims[2]);

/** By name of contract.POOLINGS: the hidden states of one text -> a vector. */
const POOL = {
  mean: (hidden) => weighted(hidden, () => 1, hidden.dims[1]),
  cls: (hidden) => row(hidden, 0),
  max: largest,
  mean_sqrt_len_tokens: (hidden) => weighted(hidden, () => 1, Math.sqrt(hidden.dims[1])),
  weightedmean: (hidden) => weighted(hidden, (i) => i + 1, (hidden.dims[1] * (hidden.dims[1] + 1)) / 2),
  lasttoken: (hidden) => row(hidden, hidden.dims[1] - 1),
};

function unit(vector) {
  const norm = single(Math.sqrt(vector.reduce((sum, x) => sum + x * x, 0)));
  return vector.map((x) => x / Math.max(norm, single(SMALLEST_NORM)));
}

/** {"embedding": floats}. Layers with parameters are refused before (lower/web/accepted.py). */
function sentenceEmbedding(contract, hidden) {
  const { layers = [], dimensions = null } = contract.embedding ?? {};
  let vector = Float32Array.from([contract.pooling].flat().flatMap((name) => Array.from(POOL[name](hidden))));
  for (const _ of [...layers, ...(contract.normalize ? ["normalize"] : [])]) vector = unit(vector);
  return { embedding: Array.from(vector.slice(0, dimensions ?? vector.length)) };
}

/** {"label", "score", "scores"}; of a single label {"label", "value"}; of several labels with an
 * activation {"labels", "scores"} or {"values"}. */
function textClassification({ labels, activation, thresholds }, { data }) {
  const values = Array.from(data, (x) => (activation === "sigmoid" ? single(1 / (1 + Math.exp(-x))) : x));
  const named = Object.fromEntries(labels.map((label, i) => [label, values[i]]));
  if (labels.length === 1) return { label: labels[0], value: values[0] };
  if (activation === "identity") return { values: named };
  if (activation === "sigmoid") {
    const least = (i) => single(thresholds ? thresholds[i] : 0.5);
    return { labels: labels.filter((_, i) => values[i] >= least(i)), scores: named };
  }
  const largest = Math.max(...data);
  const powers = data.map((x) => Math.exp(x - largest));
  const sum = powers.reduce((a, b) => a + b, 0);
  const scores = Array.from(powers, (x) => x / sum);
  const best = scores.indexOf(Math.max(...scores));
  return {
    label: labels[best],
    score: scores[best],
    scores: Object.fromEntries(labels.map((label, i) => [label, scores[i]])),
  };
}

/** {"hidden_states": a list of (tokens, width) floats}. */
function featureExtraction(_contract, { data, dims }) {
  const [, length, width] = dims;
  const numbers = (i) => Array.from(data.subarray(i * width, (i + 1) * width));
  return { hidden_states: Array.from({ length }, (_, i) => numbers(i)) };
}

const TASKS = {
  "sentence-embedding": sentenceEmbedding,
  "text-classification": textClassification,
  "feature-extraction": featureExtraction,
};

/** The answer to one text. Throws for a task that no function here has, another shape than the
 * contract's, and numbers that are NaN or infinite. */
export function answer(contract, output) {
  const task = TASKS[contract.task];
  if (!task) throw new Error(`${contract.task} is not answered here: ${Object.keys(TASKS).join(", ")}`);
  const width = output.dims.at(-1);
  if (contract.labels && contract.labels.length !== width) {
    throw new Error(`${width} numbers for ${contract.labels.length} labels`);
  }
  if (!output.data.every(Number.isFinite)) throw new Error("the model's output is NaN or infinite");
  return task(contract, output);
}
