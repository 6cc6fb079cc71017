"""Bound the growth of a text in a tokenizer.json before the tokenizer is loaded.

`tokenizers` has no limit itself: a step that writes a million characters for each, or thirty steps
that double a text, exhaust memory and end the process without an exception. The growth factors of
the steps of a normalizer, pre-tokenizer, post-processor or decoder multiply, so their product is
bounded here, as are the affixes and the word length of the model.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

LONGEST = 4_000  # maximum growth factor of a text: twelve steps that double it
ADDED = 10_000  # maximum characters or tokens added before or after a text
STEPS = 256  # maximum steps of one part; published tokenizers have about ten
AFFIX = 64  # maximum characters of a prefix or suffix of word pieces
WORD = 1_000  # maximum characters of a word in WordPiece, which takes quadratic time. Usual: 100
GROWTH = {"NFD": 4, "NFKD": 18, "NFC": 3, "NFKC": 18, "ByteLevel": 4, "BertNormalizer": 4}
# a regular expression of one character class or letter, perhaps repeated: never matches empty text
CLASS = re.compile(
    r"(?:\\[dDwWsSpPhHRXtnr](?:\{\w+\})?|\[\^?(?:\\.|\[:\w+:\]|[^\[\]\\])+\]|[\w ])"
    r"(?:\+|\{[1-9],?\d*\})?"
)
PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


class Excess(NamedTuple):
    """A value of tokenizer.json that is too large.

    field: key path in the file, e.g. "model.end_of_word_suffix".
    """

    field: str
    problem: str
    accepted: str


def find_excess(document: Any) -> Excess | None:
    """Return the first value of a tokenizer.json document that is too large, or None.

    Values of a wrong type are skipped, because `tokenizers` rejects them.
    """
    if not isinstance(document, dict):
        return None
    for part in PARTS:
        factor, added, steps = 1.0, 0, 0
        for step in _steps(document.get(part)):
            times, more = _growth(step)
            factor, added, steps = factor * times, added + more, steps + 1
            if factor > LONGEST:
                return Excess(
                    part, f"it turns one character into up to {factor:.4g}", f"{LONGEST:,}"
                )
        if added > ADDED:
            return Excess(part, f"it adds {added:,} characters or tokens", f"{ADDED:,}")
        if steps > STEPS:
            return Excess(part, f"it has {steps:,} steps", f"{STEPS:,}")
    model = document.get("model")
    if isinstance(model, dict):
        for name in ("continuing_subword_prefix", "end_of_word_suffix"):
            if isinstance(model.get(name), str) and len(model[name]) > AFFIX:
                length = f"{len(model[name]):,} characters"
                return Excess(f"model.{name}", f"it has {length}", f"{AFFIX}")
        longest = model.get("max_input_chars_per_word")
        if isinstance(longest, int) and longest > WORD:
            return Excess("model.max_input_chars_per_word", f"it is {longest:,}", f"{WORD:,}")
    return None


def _steps(part: Any) -> Iterator[Mapping[str, Any]]:
    """Yield, to bound what it adds to inputs, the steps of a part of tokenizer.json (such as its
    normalizer), including those of nested Sequences."""
    waiting = [part]
    while waiting:
        step = waiting.pop()
        if isinstance(step, dict):
            inner = [
                step.get(n) for n in ("normalizers", "pretokenizers", "processors", "decoders")
            ]
            waiting += [s for steps in inner if isinstance(steps, list) for s in steps]
            yield step


def _growth(step: Mapping[str, Any]) -> tuple[float, int]:
    """Return by how much one step of a tokenizer can lengthen a text: (factor, characters or tokens
    added)."""
    kind, content = step.get("type"), step.get("content")
    if kind == "Replace" and isinstance(content, str):
        return _replacement_growth(step.get("pattern"), len(content)), 0
    if kind == "Prepend":
        return 1, len(str(step.get("prepend")))
    if kind == "Precompiled":
        return _longest_precompiled(step.get("precompiled_charsmap")), 0
    if kind == "TemplateProcessing":
        return _template_growth(step)
    return GROWTH.get(str(kind), 1), 0


def _replacement_growth(pattern: Any, length: int) -> float:
    """Return by which factor a tokenizer lengthens a text by replacing matches of a pattern by
    `length` characters.

    A regular expression may match empty text, between any two characters.
    """
    fixed = pattern.get("String") if isinstance(pattern, dict) else None
    if isinstance(fixed, str) and fixed:
        return max(1.0, length / len(fixed))
    regex = pattern.get("Regex") if isinstance(pattern, dict) else None
    one = isinstance(regex, str) and CLASS.fullmatch(regex)
    return max(1.0, float(length)) if one else 1.0 + length


def _longest_precompiled(charsmap: Any) -> float:
    """Return the longest replacement in the SentencePiece character map of a tokenizer.

    The map holds the size of a trie in 4 bytes, the trie, and zero-terminated replacement texts.
    """
    try:
        data = base64.b64decode(charsmap, validate=True)
    except (binascii.Error, TypeError, ValueError):
        return 1
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max((len(t) for t in texts.split(b"\0")), default=1)


def _template_growth(step: Mapping[str, Any]) -> tuple[float, int]:
    """Return (copies of the text, added tokens) of a tokenizer's post-processor that applies
    templates."""
    special = step.get("special_tokens")
    ids = {
        name: len(token["ids"])
        for name, token in (special.items() if isinstance(special, dict) else ())
        if isinstance(token, dict) and isinstance(token.get("ids"), list)
    }
    times, added = 1, 0
    for name in ("single", "pair"):
        pieces = [p for p in step.get(name) or () if isinstance(p, dict)]
        texts = [str(p["Sequence"]) for p in pieces if "Sequence" in p]
        times = max([times, *(texts.count(t) for t in set(texts))])
        named = [p["SpecialToken"] for p in pieces if isinstance(p.get("SpecialToken"), dict)]
        added += sum(ids.get(str(s.get("id")), 1) for s in named)
    return times, added
