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
    Raises what tokenize raises, and InputError for a text without any token of its own.
    """
    encodings = tokenize(contract, tokenizer, texts, pairs, length)
    for i, encoding in enumerate(encodings):
        if not has_tokens(encoding):
            raise no_tokens(f"texts[{i}]")
    return pad(contract, texts, encodings, length)


def tokenize(
    contract: Contract,
    tokenizer: Any,
    texts: Sequence[str],
    pairs: Sequence[str | None] | None = None,
    length: int | None = None,
) -> list[Any]:
    """The `tokenizers.Encoding` of each text, cut to `length` tokens or the contract's max_length.

    Raises InputError for no texts, a text that is not a string or cannot be written as UTF-8, or
    a length out of range.
    """
    longest = contract.tokenizer.max_length
    check_texts(texts, pairs)
    if length is not None and not 2 <= length <= longest:
        raise InputError(
            f"{length} tokens were asked for",
            where="length",
            accepted=f"2 to {longest}, the model's max_length",
        )
    limit = longest if length is None else length
    current = tokenizer.truncation
    if current is None or current["max_length"] != limit:
        tokenizer.enable_truncation(limit)
    return list(tokenizer.encode_batch(_rows(texts, pairs)))


def has_tokens(encoding: Any) -> bool:
    """Whether anything of the text became a token, be it one that was cut off: not only those
    that the tokenizer puts around every text."""
    return bool(encoding.overflowing) or not all(encoding.special_tokens_mask)


def no_tokens(where: str) -> InputError:
    return InputError(
        "the text has no token that the model could read",
        where=where,
        fix="Give at least one word.",
    )


def whole_lengths(
    tokenizer: Any, texts: Sequence[str], pairs: Sequence[str | None] | None = None
) -> list[int]:
    """How many tokens each text has when nothing is cut, special tokens included."""
    tokenizer.no_truncation()  # tokenize sets it again
    return [len(e.ids) for e in tokenizer.encode_batch(_rows(texts, pairs))]


def pad(
    contract: Contract, texts: Sequence[str], encodings: Sequence[Any], length: int | None = None
) -> Batch:
    """Encodings as one batch, padded on the right to the longest of them, or to `length`."""
    spec = contract.tokenizer
    width = max(len(e.ids) for e in encodings) if length is None else length
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


def check_text(text: object, where: str) -> None:
    """Raises InputError for what is not a string, or holds half of a surrogate pair: JSON escapes
    and arguments of a command can, and no tokenizer reads it."""
    if not isinstance(text, str):
        raise InputError(f"{type(text).__name__} was found", where=where, accepted="str")
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise InputError(
            f"character {e.start + 1} is the lone surrogate U+{ord(text[e.start]):04X}",
            where=where,
            accepted="text that UTF-8 can hold",
        ) from None


def _rows(texts: Sequence[str], pairs: Sequence[str | None] | None) -> list[Any]:
    """As the tokenizer takes them."""
    if pairs is None:
        return list(texts)
    return [t if p is None else (t, p) for t, p in zip(texts, pairs, strict=True)]


def check_texts(texts: Sequence[str], pairs: Sequence[str | None] | None) -> None:
    """Raises InputError for no texts, another number of pairs, and as check_text does."""
    if isinstance(texts, str) or not len(texts):
        raise InputError("a list of at least one text is needed", where="texts")
    if pairs is not None and len(pairs) != len(texts):
        raise InputError(f"{len(pairs)} pairs for {len(texts)} texts", where="pairs")
    for i, text in enumerate(texts):
        check_text(text, f"texts[{i}]")
    for i, pair in enumerate(pairs or ()):
        if pair is not None:
            check_text(pair, f"pairs[{i}]")
