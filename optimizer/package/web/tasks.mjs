// From the model's output to an answer, as harness/tasks/ does it: a function per task, of the
// contract and the output of one text without padding, {data: Float32Array, dims}. numpy adds float32
// one after the other along the sequence, and so is it done here.

const SMALLEST_NORM = 1e-12;
const single = Math.fround;

/** {"embedding": floats}. */
function sentenceEmbedding(contract, { data, dims }) {
  const [, length, width] = dims;
  let pooled = data.slice(0, width);
  if (contract.pooling === "mean") {
    for (let i = 1; i < length; i++) {
      for (let j = 0; j < width; j++) pooled[j] += data[i * width + j];
    }
    pooled = pooled.map((x) => x / length);
  }
  if (contract.normalize) {
    const norm = single(Math.sqrt(pooled.reduce((sum, x) => sum + x * x, 0)));
    pooled = pooled.map((x) => x / Math.max(norm, single(SMALLEST_NORM)));
  }
  return { embedding: Array.from(pooled) };
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
  const row = (i) => Array.from(data.subarray(i * width, (i + 1) * width));
  return { hidden_states: Array.from({ length }, (_, i) => row(i)) };
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
