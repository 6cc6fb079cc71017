"""Record how a tokenizer treats each character, so that a browser detects where its own differs.

Tokenizer libraries of different years implement different versions of Unicode, and may treat a
newer character as a letter or drop it as a mark. The page therefore checks each character of a text
before it runs the model (package/web/characters.mjs), and refuses the text where

    signature(c) = the pieces of "a" + c + "b", normalized and split into words, joined by "|", with
                   every run of other letters than a and b written as "."

differs from the one recorded here, in runs of code points with equal signatures: {"signatures":
[text, ...], "runs": [[first code point, index], ...]}; index -1: not recorded.
"""

from __future__ import annotations

import re
from typing import Any

RECORDED = (*range(0xD800), *range(0xE000, 0x32400), *range(0xE0000, 0xE0200))
"""Code points up to the last ideograph, and the tags and selectors of emoji."""
LETTERS = re.compile(r"[^|ab]+")  # a run that a signature writes as "."
NONE = -1  # index of code points that are not recorded


def signature(tokenizer: Any, character: str) -> str:
    """Describe how the tokenizer treats a character in context: its signature, by which the
    bundle's web page checks the browser's text handling.

    tokenizer: a tokenizers.Tokenizer
    """
    text = f"a{character}b"
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    pieces = [text]
    if tokenizer.pre_tokenizer is not None:
        pieces = [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    return LETTERS.sub(".", "|".join(pieces))


def build_table(tokenizer: Any) -> dict[str, list[Any]]:
    """Return {"signatures", "runs"}, the table for the bundle's web page of how the tokenizer
    treats the code points in RECORDED. tokenizer: a tokenizers.Tokenizer"""
    indices: dict[str, int] = {}
    runs: list[list[int]] = []
    previous = -1
    for point in RECORDED:
        if point != previous + 1:
            runs.append([previous + 1, NONE])
        index = indices.setdefault(signature(tokenizer, chr(point)), len(indices))
        if not runs or runs[-1][1] != index:
            runs.append([point, index])
        previous = point
    runs.append([previous + 1, NONE])
    return {"signatures": list(indices), "runs": runs}
