"""How much longer a tokenizer.json may make a text, worked out from the file before it is used.

`tokenizers` replaces without a bound: a step that writes a million characters for each, or thirty
that double, end the process for lack of memory, which nothing can catch. The steps of a normalizer,
pre-tokenizer, post-processor or decoder multiply, so their product is bounded here, and what of a
word the model looks up.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

LONGEST = 4_000  # characters that one may become: twelve steps that may each double a text
ADDED = 10_000  # characters or tokens that are put before or after
STEPS = 256  # of one part; published tokenizers have about ten
AFFIX = 64  # characters of a prefix or suffix that the model writes to each piece of a word
WORD = 1_000  # characters of a word that WordPiece divides: it takes their square. Usual: 100
SEVERAL = {"NFD": 4, "NFKD": 18, "NFC": 3, "NFKC": 18, "ByteLevel": 4, "BertNormalizer": 4}
# one class of characters or one letter, which may be repeated: it matches one character or more
CLASS = re.compile(
    r"(?:\\[dDwWsSpPhHRXtnr](?:\{\w+\})?|\[\^?(?:\\.|\[:\w+:\]|[^\[\]\\])+\]|[\w ])"
    r"(?:\+|\{[1-9],?\d*\})?"
)
PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


class Excess(NamedTuple):
    """What is too large, by its place in the file."""

    field: str
    problem: str
    accepted: str


def excess(document: Any) -> Excess | None:
    """The first thing in the document of a tokenizer.json that is too large; None where nothing is.

    What has another type than it should is left to `tokenizers`, which refuses it.
    """
    if not isinstance(document, dict):
        return None
    for part in PARTS:
        factor, added, steps = 1.0, 0, 0
        for step in _steps(document.get(part)):
            times, more = _growth(step)
            factor, added, steps = factor * times, added + more, steps + 1
            if factor > LONGEST:
                return Excess(part, f"it makes {factor:.4g} characters of one", f"{LONGEST:,}")
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
    """The steps of a part, those of a Sequence in a Sequence as well."""
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
    """(characters or tokens that one becomes, those that are added) in one step."""
    kind, content = step.get("type"), step.get("content")
    if kind == "Replace" and isinstance(content, str):
        return _replaced(step.get("pattern"), len(content)), 0
    if kind == "Prepend":
        return 1, len(str(step.get("prepend")))
    if kind == "Precompiled":
        return _longest_precompiled(step.get("precompiled_charsmap")), 0
    if kind == "TemplateProcessing":
        return _template(step)
    return SEVERAL.get(str(kind), 1), 0


def _replaced(pattern: Any, length: int) -> float:
    """A text of its pattern's length becomes one of `length`; what a regular expression matches
    may be empty."""
    fixed = pattern.get("String") if isinstance(pattern, dict) else None
    if isinstance(fixed, str) and fixed:
        return max(1.0, length / len(fixed))
    regex = pattern.get("Regex") if isinstance(pattern, dict) else None
    one = isinstance(regex, str) and CLASS.fullmatch(regex)
    return max(1.0, float(length)) if one else 1.0 + length


def _longest_precompiled(charsmap: Any) -> float:
    """SentencePiece's map: 4 bytes with the size of a trie, the trie, and the texts that it points
    into, each ended by a zero."""
    try:
        data = base64.b64decode(charsmap, validate=True)
    except (binascii.Error, TypeError, ValueError):
        return 1
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max((len(t) for t in texts.split(b"\0")), default=1)


def _template(step: Mapping[str, Any]) -> tuple[float, int]:
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
