// Answers of a bundle's page code in node: web_ask.mjs, copied into the bundle, run as
//   node ask.mjs quantized|float|tokens
// with a JSON list of texts on standard input; with `tokens` the ids alone, of texts.json, null for a text that is refused.

import fs from "node:fs/promises";
import { open } from "./web/model.mjs";
import { openTokenizer } from "./web/text.mjs";

const which = process.argv[2];
const read = async (name) => new Uint8Array(await fs.readFile(new URL(name, import.meta.url)));
const json = async (name) => JSON.parse(Buffer.from(await read(name)).toString("utf8"));

async function tokens() {
  const { characters, contract } = await json("web/bundle.json");
  const tokenize = openTokenizer(await json("tokenizer/tokenizer.json"), characters);
  return (await json("texts.json")).map((text) => {
    try {
      return tokenize(text, contract.tokenizer.max_length).ids;
    } catch {
      return null;
    }
  });
}

async function answers() {
  let model;
  try {
    model = await open(read, { which, threads: 1 });
  } catch (error) {
    return [{ refused: `${error.name}: ${error.message}` }];
  }
  const results = [];
  for (const text of JSON.parse(await fs.readFile("/dev/stdin", "utf8"))) {
    results.push(await model.answer(text).catch((error) => ({ error: error.message })));
  }
  return results;
}

console.log(JSON.stringify(which === "tokens" ? await tokens() : await answers()));
