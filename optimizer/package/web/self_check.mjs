// Whether this browser answers as the harness did where the bundle was made. Three comparisons:
//   ids      of each text's tokens, to the last one;
//   output   of the model, by the distance and the limit of the ledger: how far correct runs of this
//            model lie apart (docs/proof.md);
//   answer   from the harness's own output, as the harness gives it, within rounding.

import { answer } from "./tasks.mjs";

const ROUNDOFF = 2 ** -24; // of float32

/** {texts, worst, limit}: how far off the outputs are. Throws for the first that differs. */
export async function check(model, bundle, entry) {
  const outputs = entry.outputs.map((o) => o && { data: floats(o.data), dims: o.dims });
  const found = [];
  for (const [i, expected] of bundle.check.entries()) {
    const encoded = model.encode(expected.text);
    if (encoded.ids.join() !== expected.ids.join()) {
      throw new Error(`${shown(expected)}: the tokens are not the harness's. ${REFUSED}`);
    }
    found.push(outputs[i] && (await model.run(encoded)));
  }
  const worst = distances(found, outputs).reduce((a, b) => (b <= a ? a : b), 0);
  if (!(worst <= entry.limit)) {
    throw new Error(
      `the model's output is ${worst.toPrecision(2)} from the harness's, and correct runs lie ` +
        `within ${entry.limit.toPrecision(2)}. ${REFUSED}`,
    );
  }
  outputs.forEach((output, i) => output && checkAnswer(model.contract, output, bundle.check[i], entry.answers[i]));
  return { texts: bundle.check.length, worst, limit: entry.limit };
}

const REFUSED = "Nothing is answered here, for it would be wrong.";

function shown({ text }) {
  return JSON.stringify(text.length > 40 ? `${text.slice(0, 40)}…` : text);
}

/** Every number of the answer to the harness's own output: of n float32 added one after the other, or
 * pairwise, the sums lie within 2 n roundoffs of each other, and so do what is divided by them. */
function checkAnswer(contract, output, text, expected) {
  const bound = 2 * (output.dims.reduce((a, b) => a * b, 1) / output.dims.at(-1) + output.dims.at(-1)) * ROUNDOFF;
  const mine = leaves(answer(contract, output));
  const theirs = leaves(expected);
  const largest = theirs.reduce((a, b) => (typeof b === "number" ? Math.max(a, Math.abs(b)) : a), 0);
  const same = (a, b) => (typeof b === "number" ? Math.abs(a - b) <= bound * largest : a === b);
  if (mine.length !== theirs.length || !mine.every((a, i) => same(a, theirs[i]))) {
    throw new Error(`${shown(text)}: another answer than the harness's from the same output. ${REFUSED}`);
  }
}

function leaves(value) {
  return typeof value === "object" ? Object.values(value).flatMap(leaves) : [value];
}

/** As validate/ledger/distance.py: relative to an output's own norm, or that of a usual one of its
 * size where its own is smaller. Infinite for another shape or what is not finite. */
function distances(found, expected) {
  const both = expected.map((e, i) => [found[i], e]).filter(([, e]) => e);
  const squares = both.map(([, e]) => e.data.reduce((sum, x) => sum + x * x, 0));
  const usual = squares.reduce((a, b) => a + b, 0) / both.reduce((n, [, e]) => n + e.data.length, 0);
  return both.map(([f, e], i) => {
    if (f.dims.join() !== e.dims.join() || !f.data.every(Number.isFinite)) return Infinity;
    const far = e.data.reduce((sum, x, j) => sum + (f.data[j] - x) ** 2, 0);
    return far === 0 ? 0 : Math.sqrt(far / Math.max(squares[i], usual * e.data.length));
  });
}

/** float32 numbers, little-endian, from base64. */
function floats(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return new Float32Array(bytes.buffer);
}
