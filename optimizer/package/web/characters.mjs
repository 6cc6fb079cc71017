// Whether this browser's tokenizer takes each character of a text as the harness's did where the
// bundle was made: package/web_characters.py says how, and why they differ.

const OTHERS = /[^|ab]+/gu;

function signature(library, character) {
  const text = `a${character}b`;
  const normalized = library.normalizer ? library.normalizer(text) : text;
  const pieces = library.pre_tokenizer ? library.pre_tokenizer(normalized, { section_index: 0 }) : [normalized];
  return pieces.join("|").replace(OTHERS, ".");
}

/** A function that throws for a text with a character that is taken in another way here. */
export function comparing(library, { signatures, runs }) {
  const known = new Map(); // character -> whether it is alike
  const recorded = (point) => {
    let low = 0;
    let high = runs.length;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (runs[middle][0] <= point) low = middle;
      else high = middle;
    }
    return signatures[runs[low][1]];
  };
  return (text) => {
    for (const character of text) {
      if (!known.has(character)) {
        known.set(character, signature(library, character) === recorded(character.codePointAt(0)));
      }
      if (!known.get(character)) {
        const name = character.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
        throw new RangeError(`U+${name} makes other tokens in this browser than in the harness: leave it out`);
      }
    }
  };
}
