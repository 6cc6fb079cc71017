"""Texts, or pairs of texts, to padded arrays of token ids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from ..bounds import TEXT as READ_AT_MOST
from ..errors import BundleError, InputError
from .batch import Array, Batch
from .expansion import excess
from .kind import Encoded, InputKind

if TYPE_CHECKING:
    from ..contract import Contract

MASK = "attention_mask"
READ_WHOLE = 10_000  # characters of a text that is tokenized without a second thought
PER_TOKEN = 40  # characters that a token may have, before more of the text is read
PIECE = 200_000  # characters tokenized together where all of a text is needed
TEXTS = 1_000  # tokenized together where all tokens of many texts are needed
NEUTRAL = tuple(
    f"This is sentence number {i} and it says nothing that any other data could say."
    for i in range(32)
)
"""Timed where no other texts are given."""


class TextTokenizer:
    """A `tokenizers.Tokenizer` that cuts and pads nothing, and copies of it that cut.

    Whatever else it is asked for is the tokenizer's own. How much the library cuts is a setting of
    the tokenizer: no call changes one here, so threads can share it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._whole = tokenizer
        self._cut: dict[int, Any] = {}
        self._lock = Lock()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._whole, name)

    def cut_at(self, length: int) -> Any:
        """The copy whose texts have `length` tokens at most, special tokens included."""
        with self._lock:
            if length not in self._cut:
                copy = type(self._whole).from_str(self._whole.to_str())
                copy.enable_truncation(length)
                self._cut[length] = copy
            return self._cut[length]

    def head(self, text: str, length: int) -> str:
        """The beginning of a text that its first `length` tokens come from; all of a short one.

        Cut at white space, and long enough for twice as many tokens, so that nothing the cut does
        to its last words is among them. A text whose first READ_AT_MOST characters make fewer (one
        endless word, blanks) is cut there.
        """
        size = min(max(READ_WHOLE, PER_TOKEN * length), READ_AT_MOST)
        while len(text) > size:
            beginning = text[: _last_space(text, size)]
            enough = len(self._whole.encode(beginning, add_special_tokens=False).ids) >= 2 * length
            if enough or size >= READ_AT_MOST:
                return beginning
            size = min(4 * size, READ_AT_MOST)
        return text

    def ids(self, texts: Sequence[str]) -> list[list[int]]:
        """All token ids of each text, whatever its length, without special tokens.

        One of more than PIECE characters is tokenized in pieces that end at white space, so memory
        stays that of a piece. With a tokenizer that puts a space before every text it is called
        with (Llama 2's kind) that is one token more per piece than the whole text would have.
        """
        ids: list[list[int]] = []
        for start in range(0, len(texts), TEXTS):  # an Encoding takes 120 bytes a token
            some = texts[start : start + TEXTS]
            short = [text if len(text) <= PIECE else "" for text in some]
            encodings = self._whole.encode_batch(short, add_special_tokens=False)
            ids += [
                list(encoding.ids) if len(text) <= PIECE else self._in_pieces(text)
                for text, encoding in zip(some, encodings, strict=True)
            ]
        return ids

    def _in_pieces(self, text: str) -> list[int]:
        ids: list[int] = []
        start = 0
        while start < len(text):
            end = min(start + PIECE, len(text))
            end = end if end == len(text) else _last_space(text, end, start)
            ids += self._whole.encode(text[start:end], add_special_tokens=False).ids
            start = end
        return ids


def _last_space(text: str, end: int, start: int = 0) -> int:
    """Where the last white space before `end` is, in the second half of start..end; else `end`."""
    for at in range(end - 1, start + (end - start) // 2, -1):
        if text[at].isspace():
            return at
    return end


def load_tokenizer(folder: Path, contract: Contract) -> TextTokenizer:
    """The tokenizer of the contract.

    What the file says about padding and truncation is dropped: many published files pad every
    text to 128 tokens. The contract decides, and `encode` and `collate` do it. Raises BundleError
    when the file is missing, not a tokenizer, or does not know the contract's padding token.
    """
    from tokenizers import Tokenizer

    path = folder / contract.text.file
    if not path.is_file():
        raise BundleError("the tokenizer is missing", where=str(path))
    try:
        over = excess(json.loads(path.read_bytes()))
        if over is not None:
            raise BundleError(
                over.problem, where=f"{path}: {over.field}", accepted=f"up to {over.accepted}"
            )
        tokenizer = Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit, BundleError):
        raise
    except BaseException as e:  # the library raises bare Exception, and panics of Rust
        raise BundleError(f"not a tokenizer ({e})", where=str(path)) from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    known = tokenizer.token_to_id(contract.text.pad_token)
    if known != contract.text.pad_id:
        raise BundleError(
            f"padding token {contract.text.pad_token!r} has id {known}, "
            f"the contract says {contract.text.pad_id}",
            where=str(path),
            fix="The tokenizer does not belong to this model; package it again.",
        )
    return TextTokenizer(tokenizer)


def encode(
    contract: Contract,
    tokenizer: TextTokenizer,
    texts: Sequence[str],
    pairs: Sequence[str | None] | None = None,
    length: int | None = None,
) -> list[Encoded]:
    """Each text tokenized, and cut to `length` tokens or the contract's max_length.

    pairs: a second text per text, or None for none. A text has a problem when nothing of it became
    a token. Raises InputError for no texts, a text that is not a string or cannot be written as
    UTF-8, or a length out of range.
    """
    longest = contract.text.max_length
    check_texts(texts, pairs)
    if length is not None and not 2 <= length <= longest:
        raise InputError(
            f"{length} tokens were asked for",
            where="length",
            accepted=f"2 to {longest}, the model's max_length",
        )
    limit = longest if length is None else length
    heads = [tokenizer.head(text, limit) for text in texts]
    seconds = pairs and [None if pair is None else tokenizer.head(pair, limit) for pair in pairs]
    encodings = tokenized(tokenizer.cut_at(limit), _rows(heads, seconds))
    shorter = [
        len(head) < len(text) or bool(second and pair and len(second) < len(pair))
        for text, head, pair, second in zip(
            texts, heads, pairs or texts, seconds or heads, strict=True
        )
    ]
    return [_encoded(*row) for row in zip(texts, encodings, shorter, strict=True)]


def tokenized(tokenizer: Any, rows: list[Any]) -> list[Any]:
    """An Encoding of each text or pair. Raises BundleError for a tokenizer that fails at it, as one
    without its unknown token does."""
    try:
        return list(tokenizer.encode_batch(rows))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:  # the library raises bare Exception, and panics of Rust
        raise BundleError(f"the tokenizer cannot read a text ({e})", where="tokenizer") from None


def _encoded(text: str, encoding: Any, shorter: bool) -> Encoded:
    """shorter: the end of the text was not even tokenized."""
    cut = bool(encoding.overflowing) or (shorter and not all(encoding.special_tokens_mask))
    # not only the tokens that the tokenizer puts around every text, be it one that was cut off
    if cut or not all(encoding.special_tokens_mask):
        return Encoded(text, encoding, len(encoding.ids), cut)
    return Encoded(
        text,
        encoding,
        len(encoding.ids),
        problem="the text has no token that the model could read",
        fix="Give at least one word.",
    )


def whole_lengths(
    tokenizer: TextTokenizer, texts: Sequence[str], pairs: Sequence[str | None] | None = None
) -> list[int]:
    """How many tokens each text has when nothing is cut, special tokens included. Of one with more
    than READ_AT_MOST characters, those of so many."""
    heads = [text[:READ_AT_MOST] for text in texts]
    seconds = pairs and [None if pair is None else pair[:READ_AT_MOST] for pair in pairs]
    return [len(e.ids) for e in tokenized(tokenizer, _rows(heads, seconds))]


def collate(contract: Contract, encoded: Sequence[Encoded], length: int | None = None) -> Batch:
    """One batch, padded on the right to the longest text, or to `length`. Arrays have the
    contract's inputs and dtypes, and its order."""
    spec = contract.text
    encodings = [e.encoding for e in encoded]
    width = max(e.size for e in encoded) if length is None else length
    columns = {
        "input_ids": (spec.pad_id, [e.ids for e in encodings]),
        MASK: (0, [e.attention_mask for e in encodings]),
        "token_type_ids": (spec.pad_type_id, [e.type_ids for e in encodings]),
    }
    arrays = {}
    for tensor in contract.inputs:
        padding, lists = columns[tensor.name]
        array = np.full((len(lists), width), padding, dtype=tensor.dtype)
        for row, values in zip(array, lists, strict=True):
            row[: len(values)] = values
        arrays[tensor.name] = array
    return Batch(arrays, [e.input for e in encoded], encodings, real(arrays))


def real(arrays: Mapping[str, Array]) -> Array:
    """Which positions are tokens and not padding, (batch, sequence) bool."""
    return np.asarray(arrays[MASK]).astype(bool)


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


def _rows(texts: Sequence[str], pairs: Sequence[str | None] | None) -> list[Any]:
    """As the tokenizer takes them."""
    if pairs is None:
        return list(texts)
    return [t if p is None else (t, p) for t, p in zip(texts, pairs, strict=True)]


def longest(contract: Contract) -> int:
    """The most tokens of a text."""
    return contract.text.max_length


def lengthened(texts: Iterable[str], size: int) -> str:
    """Texts joined until there are `size` words or more, or no more texts."""
    words: list[str] = []
    for text in texts:
        words += text.split() or ["."]
        if len(words) >= size:
            break
    return " ".join(words)


TEXT = InputKind(
    name="text",
    encode=encode,
    collate=collate,
    parse=str,
    open=load_tokenizer,
    arrays=("input_ids", MASK),
    sections=("tokenizer",),
    columns=("text", "text_pair"),
    requires=("tokenizers",),
    real=real,
    whole_sizes=whole_lengths,
    example='"what a lovely film"',
    size="tokens",
    longest=longest,
    extent=len,
    neutral=lambda _: list(NEUTRAL),
    lengthened=lengthened,
)
