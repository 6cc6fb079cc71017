"""Find equal inputs in data sets. Arrays and image files are compared by digest, texts by token
ids, or by characters if the model has no tokenizer."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from optimizer.data.sample import Sample
from optimizer.foundation.errors import DataError
from optimizer.foundation.progress import say

TokenIds = Callable[[Sequence[str]], Sequence[Sequence[int]]]
"""texts -> token ids of each, without a limit on length: TextTokenizer.ids."""


def check_disjoint(
    sets: Mapping[str, Sequence[Sample]],
    ids: TokenIds | None = None,
    *,
    ranks: bool = False,
    extracts: bool = False,
) -> None:
    """Raise DataError when an image, or a text of a row or pair, is in two data sets. A model looks
    too good on data that it was tuned on.

    sets: {name: rows}
    ids: function from texts to token ids; None: texts are compared by characters
    ranks: True for queries and documents, of which only queries are compared, because queries share
        the documents of a corpus
    extracts: True for questions and contexts, of which only contexts are compared
    """
    compared = slice(0, 1) if ranks else slice(1 if extracts else 0, None)
    same = "the same characters" if ids is None else "the same token ids"
    seen: dict[str | bytes, str] = {}
    for name, rows in sets.items():
        texts = [t for r in rows for t in _texts(r)[compared]]
        keys = make_text_keys(texts, ids)
        inputs: list[tuple[str | bytes, str]] = [(key, text) for text, key in keys.items()]
        inputs += [(r.image.sha256, r.image.name) for r in rows if r.image]
        inputs += [(r.arrays.sha256, f"row {i}") for i, r in enumerate(rows) if r.arrays]
        for key, shown in inputs:
            other = seen.setdefault(key, name)
            if other != name:
                raise DataError(
                    f"{shown[:80]!r} is also in the {other} data "
                    f"({'the same file' if shown not in keys else same})",
                    where=f"{name} data",
                    accepted="data sets without a common input",
                    fix="Use different rows: another split, file or seed.",
                )


def _texts(row: Sample) -> tuple[str, ...]:
    return (
        ()
        if row.image is not None or row.arrays is not None
        else tuple(t for t in (row.text, row.text_pair) if t)
    )


def make_text_keys(texts: Sequence[str], ids: TokenIds | None) -> dict[str, str | bytes]:
    """Return {text of a data set: key}, with equal keys for texts that a model cannot distinguish.

    ids: function from texts to token ids, of which a key is the digest; None: the key is the text
    """
    distinct = list(dict.fromkeys(texts))
    if ids is None:
        return {text: text for text in distinct}
    digests = (hashlib.sha256(np.array(i, np.int64).tobytes()).digest() for i in ids(distinct))
    return dict(zip(distinct, digests, strict=True))


def _answers(row: Sample) -> tuple[object, ...]:
    named = row.label, row.labels, row.score, row.scores, row.tags, row.answers
    return *named, row.objects, row.keypoints, *(p and p.sha256 for p in (row.mask, row.depth))


def drop_repeated(rows: Sequence[Sample], where: str, ids: TokenIds | None = None) -> list[Sample]:
    """Return the data set's rows without later rows that repeat an input; inputs are compared as in
    check_disjoint."""
    keys = make_text_keys([t for r in rows for t in _texts(r)], ids)
    first: dict[tuple[str | bytes, ...], Sample] = {}
    differ = 0
    for row in rows:
        pair = (keys.get(row.text, ""), keys.get(row.text_pair or "", ""))
        whole = row.image or row.arrays
        first_row = first.setdefault((whole.sha256,) if whole else pair, row)
        differ += _answers(row) != _answers(first_row)
    if len(first) < len(rows):
        more = f"; {differ} of them have another label than that row" if differ else ""
        arrays = rows[0].arrays is not None
        what = (
            "arrays"
            if arrays
            else "image"
            if rows[0].image is not None
            else "text"
            if ids is None
            else "token ids"
        )
        say(
            f"{where}: {len(rows) - len(first)} of {len(rows)} rows dropped: the same {what} as an "
            f"earlier row{more}"
        )
    return list(first.values())
