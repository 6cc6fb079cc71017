// From a text to the arrays the model takes, as harness/inputs/text.py does it.

import { comparing } from "./characters.mjs";
import { Tokenizer } from "./tokenizers/tokenizers.min.mjs";

const LONGEST = 1 << 20; // characters of a text: harness/bounds.py

/** (text, longest) -> its tokens, see encode. file: the parsed tokenizer.json; characters: what is
 * recorded of each. What it says of padding and truncation is not used, here or
 * there: the contract decides. */
export function openTokenizer(file, characters) {
  const library = new Tokenizer({ ...file, padding: null, truncation: null }, {});
  const compare = comparing(library, characters);
  const lowers = lowercases(file.normalizer);
  return (text, longest) => {
    checkText(text);
    compare(text);
    return encode(library, lowers ? text.replaceAll("Σ", "σ") : text, longest);
  };
}

/** Whether a normalizer lowercases. JavaScript makes a final Σ a ς, and the harness's tokenizer, which
 * takes letter by letter, a σ. */
function lowercases(normalizer) {
  if (!normalizer) return false;
  if (normalizer.type === "Sequence") return normalizer.normalizers.some(lowercases);
  return normalizer.type === "Lowercase" || (normalizer.type === "BertNormalizer" && normalizer.lowercase);
}

function checkText(text) {
  if (text.length > LONGEST) {
    throw new RangeError(`the text has ${text.length} characters. Accepted: up to ${LONGEST}`);
  }
  if (!text.isWellFormed()) throw new RangeError("the text holds half of a surrogate pair");
}

/** {ids, types, cut}: token ids and type ids of `text`, special tokens included, `longest` at most.
 * Longer texts lose their last tokens and keep the special ones. Throws for a text without a token. */
function encode(library, text, longest) {
  const plain = library.encode(text, { add_special_tokens: false }).ids;
  if (!plain.length) throw new RangeError("the text has no token that the model could read");
  const whole = library.encode(text, { return_token_type_ids: true });
  const types = whole.token_type_ids ?? whole.ids.map(() => 0);
  if (whole.ids.includes(undefined)) throw new Error("the tokenizer has no id for part of the text");
  const excess = whole.ids.length - longest;
  if (excess <= 0) return { ids: whole.ids, types, cut: false };
  const kept = plain.length - excess;
  if (kept < 0) throw new RangeError(`${longest} tokens hold no more than the special ones`);
  const start = where(whole.ids, plain) + kept;
  const without = (all) => [...all.slice(0, start), ...all.slice(start + excess)];
  return { ids: without(whole.ids), types: without(types), cut: true };
}

/** Where the text's own tokens begin among all of them. */
function where(all, part) {
  for (let at = 0; at + part.length <= all.length; at++) {
    if (part.every((id, i) => all[at + i] === id)) return at;
  }
  throw new Error("special tokens stand inside the text, so that it cannot be cut");
}

/** {name: {type, data, dims}} of the contract's inputs, for one text; padded to a length where the
 * model reads padding. */
export function arrays(contract, { ids, types }) {
  const { padded_to: width, pad_id: id, pad_type_id: type } = contract.tokenizer;
  const padding = Array(Math.max((width ?? 0) - ids.length, 0)).fill();
  const columns = {
    input_ids: [...ids, ...padding.map(() => id)],
    attention_mask: [...ids, ...padding].map(() => 1),
    token_type_ids: [...types, ...padding.map(() => type)],
  };
  return Object.fromEntries(
    contract.inputs.map(({ name, dtype }) => {
      const data = dtype === "int64" ? BigInt64Array.from(columns[name], BigInt) : Int32Array.from(columns[name]);
      return [name, { type: dtype, data, dims: [1, columns[name].length] }];
    }),
  );
}
