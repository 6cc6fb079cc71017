// The bundle's model in onnxruntime-web.
//
//   import { open, overHttp } from "./model.mjs";
//   const model = await open(overHttp(new URL("../", import.meta.url)));
//   await model.answer("some text");             // {answer, milliseconds: {tokenize, run}, cut}
//
// It opens only after its answers to the texts in bundle.json were compared with those of the
// harness (self_check.mjs), and throws where they are not the same.

import * as ort from "./onnxruntime-web/ort.wasm.min.mjs";
import { verified } from "./files.mjs";
import { check } from "./self_check.mjs";
import { answer } from "./tasks.mjs";
import { arrays, openTokenizer } from "./text.mjs";

export { overHttp } from "./files.mjs";

const FOLDER = new URL("./onnxruntime-web/", import.meta.url);
const WASM = "web/onnxruntime-web/ort-wasm-simd-threaded.wasm";
const decoder = new TextDecoder("utf-8", { fatal: true });

/** read: (name) -> bytes of a file of the bundle. which: "quantized", or "float" where the bundle has
 * it. threads: instead of the bundle's. */
export async function open(read, { which = "quantized", threads } = {}) {
  const bundle = JSON.parse(decoder.decode(await read("web/bundle.json")));
  const files = verified(read, bundle.files);
  const entry = bundle.models[which];
  if (!entry) throw new Error(`the bundle has no ${which} model: ${Object.keys(bundle.models).join(", ")}`);
  const [file, model, wasm, ...external] = await Promise.all(
    [`tokenizer/${bundle.contract.tokenizer.file}`, entry.model, WASM, ...entry.external].map(files),
  );
  ort.env.wasm.wasmPaths = FOLDER.href;
  ort.env.wasm.wasmBinary ??= wasm.buffer;
  ort.env.wasm.numThreads = threads ?? bundle.threads;
  const session = await ort.InferenceSession.create(model, {
    executionProviders: ["wasm"],
    externalData: entry.external.map((name, i) => ({ path: name.split("/").at(-1), data: external[i] })),
  });
  const opened = new Model(bundle, session, openTokenizer(JSON.parse(decoder.decode(file)), bundle.characters));
  opened.checked = await check(opened, bundle, entry);
  return opened;
}

class Model {
  constructor(bundle, session, tokenize) {
    this.bundle = bundle;
    this.contract = bundle.contract;
    this.session = session;
    this.tokenize = tokenize;
  }

  /** The tokens of a text, with the default prompt of a sentence embedding before it. */
  encode(text) {
    const { prompts = {}, prompt } = this.contract.embedding ?? {};
    return this.tokenize((prompts[prompt] ?? "") + text, this.contract.tokenizer.max_length);
  }

  /** The output that the task reads, {data, dims}, of one encoded text. */
  async run(encoded) {
    const feeds = Object.entries(arrays(this.contract, encoded)).map(([name, a]) => [
      name,
      new ort.Tensor(a.type, a.data, a.dims),
    ]);
    const outputs = await this.session.run(Object.fromEntries(feeds));
    const { data, dims } = outputs[this.bundle.output];
    return { data, dims };
  }

  async answer(text) {
    const start = performance.now();
    const encoded = this.encode(text);
    const tokenized = performance.now();
    const output = await this.run(encoded);
    const milliseconds = { tokenize: tokenized - start, run: performance.now() - tokenized };
    return { answer: answer(this.contract, output), milliseconds, tokens: encoded.ids.length, cut: encoded.cut };
  }

  close() {
    return this.session.release();
  }
}
