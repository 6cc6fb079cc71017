"""Texts to padded arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..contract import Contract
from ..errors import InputError

Array = NDArray[Any]


class Batch(dict[str, Array]):
    """The model's input arrays by name, (batch, sequence) each; what `Runner.infer` takes.

    encodings: the tokenizer's view of each text (offsets, word numbers), in order.
    texts: what was encoded.
    """

    def __init__(self, arrays: dict[str, Array], texts: Sequence[str], encodings: Sequence[Any]):
        super().__init__(arrays)
        self.texts = tuple(texts)
        self.encodings = tuple(encodings)


def encode(
    contract: Contract,
    tokenizer: Any,
    texts: Sequence[str],
    pairs: Sequence[str | None] | None = None,
    length: int | None = None,
) -> Batch:
    """Tokenize, cut to the contract's max_length, and pad on the right to the longest text.

    pairs: a second text per text, or None for none. length: cut and pad to exactly this many
    tokens instead. Arrays have the contract's inputs and dtypes, and its order.
    Raises InputError for no texts, a text that is not a string, or a length out of range.
    """
    spec = contract.tokenizer
    _check(texts, pairs, length, spec.max_length)
    limit = spec.max_length if length is None else length
    current = tokenizer.truncation
    if current is None or current["max_length"] != limit:
        tokenizer.enable_truncation(limit)
    rows: list[Any] = list(texts)
    if pairs is not None:
        rows = [t if p is None else (t, p) for t, p in zip(texts, pairs, strict=True)]
    encodings = tokenizer.encode_batch(rows)
    width = max(len(e.ids) for e in encodings) if length is None else length
    if width == 0:
        raise InputError("no text has any token", fix="Give at least one word.")
    wanted = {i.name: i.dtype for i in contract.inputs}
    columns = {
        "input_ids": (spec.pad_id, [e.ids for e in encodings]),
        "attention_mask": (0, [e.attention_mask for e in encodings]),
        "token_type_ids": (spec.pad_type_id, [e.type_ids for e in encodings]),
    }
    arrays = {}
    for name, dtype in wanted.items():
        padding, lists = columns[name]
        array = np.full((len(lists), width), padding, dtype=dtype)
        for row, values in zip(array, lists, strict=True):
            row[: len(values)] = values
        arrays[name] = array
    return Batch(arrays, texts, encodings)


def _check(
    texts: Sequence[str], pairs: Sequence[str | None] | None, length: int | None, longest: int
) -> None:
    if isinstance(texts, str) or not len(texts):
        raise InputError("a list of at least one text is needed", where="texts")
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(
                f"{type(text).__name__} was found", where=f"texts[{i}]", accepted="str"
            )
    if pairs is not None and len(pairs) != len(texts):
        raise InputError(f"{len(pairs)} pairs for {len(texts)} texts", where="pairs")
    if length is not None and not 2 <= length <= longest:
        raise InputError(
            f"{length} tokens were asked for",
            where="length",
            accepted=f"2 to {longest}, the model's max_length",
        )
