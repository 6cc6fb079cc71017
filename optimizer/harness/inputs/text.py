"""Tokenize texts, or pairs of texts, into padded arrays of token ids.

The prompt of a sentence embedding (embedding_settings.py) is put before each text here and nowhere
else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from ..bounds import TEXT as READ_AT_MOST
from ..errors import BundleError, InputError
from .batch import Array, Batch
from .expansion import find_excess
from .kind import Encoded, InputKind

if TYPE_CHECKING:
    from ..contract import Contract

MASK = "attention_mask"
READ_WHOLE = 10_000  # characters up to which a text is always tokenized whole
PER_TOKEN = 40  # characters read per token of the limit at first
PIECE = 200_000  # characters per piece of a text that is tokenized without truncation
TEXTS = 1_000  # texts tokenized at once without truncation
NEUTRAL = tuple(
    f"This is sentence number {i} and it says nothing that any other data could say."
    for i in range(32)
)
"""Default texts for timing."""


class TextTokenizer:
    """The tokenizer of a model's input texts: a `tokenizers.Tokenizer` without truncation and
    padding, and copies with truncation.

    Other attributes are the Tokenizer's. Truncation is a setting of the library's object;
    no call changes a setting here, so threads can share it.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._whole = tokenizer
        self._cut: dict[tuple[int, int, str], Any] = {}
        self._lock = Lock()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._whole, name)

    def cut_at(self, length: int, stride: int = 0, strategy: str = "longest_first") -> Any:
        """Return the copy of the tokenizer that truncates to `length` tokens, special tokens
        included.

        stride: tokens that a truncated part shares with the one before it.
        strategy: the library's name of the texts of a pair that are truncated.
        """
        key = length, stride, strategy
        with self._lock:
            if key not in self._cut:
                copy = type(self._whole).from_str(self._whole.to_str())
                copy.enable_truncation(length, stride=stride, strategy=strategy)
                self._cut[key] = copy
            return self._cut[key]

    @cached_property
    def unknown_id(self) -> int:
        """Return the id of the tokenizer's unknown token; -1 without one."""
        model = self._whole.model
        if hasattr(model, "unk_token"):
            unknown = self._whole.token_to_id(model.unk_token) if model.unk_token else None
        else:  # Unigram has it only in its JSON
            unknown = json.loads(self._whole.to_str())["model"].get("unk_id")
        return -1 if unknown is None else int(unknown)

    def head(self, text: str, length: int) -> str:
        """Return the beginning of an input text that determines its first `length` tokens.

        The text is cut at white space behind at least 2 * `length` tokens, so that the cut cannot
        change the first `length`. If the first READ_AT_MOST characters have fewer tokens (one
        endless word, blanks), it is cut there.
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
        """Return all token ids of each input text, without truncation and special tokens.

        A text of more than PIECE characters is tokenized in pieces that end at white space, which
        bounds memory. A tokenizer that puts a space before every text (like Llama 2's) adds one
        token per piece.
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
    """Find where to cut an input text: return the index of the last white space in the second half
    of start..end, else `end`."""
    for at in range(end - 1, start + (end - start) // 2, -1):
        if text[at].isspace():
            return at
    return end


def load_tokenizer(folder: Path, contract: Contract) -> TextTokenizer:
    """Load the tokenizer of the contract.

    Padding and truncation of the file are ignored, because many published files pad every text to
    128 tokens; `encode` and `collate` follow the contract. Raises BundleError if the file is
    missing, is not a tokenizer, or has another id for the contract's padding token.
    """
    from tokenizers import Tokenizer

    path = folder / contract.text.file
    if not path.is_file():
        raise BundleError("the tokenizer is missing", where=str(path))
    try:
        over = find_excess(json.loads(path.read_bytes()))
        if over is not None:
            raise BundleError(
                over.problem, where=f"{path}: {over.field}", accepted=f"up to {over.accepted}"
            )
        tokenizer = Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit, BundleError):
        raise
    except BaseException as e:  # the library raises bare Exception, and panics of Rust
        raise BundleError(f"it is not a tokenizer ({e})", where=str(path)) from None
    tokenizer.no_padding()
    tokenizer.no_truncation()
    pad_id = tokenizer.token_to_id(contract.text.pad_token)
    if pad_id != contract.text.pad_id:
        raise BundleError(
            f"padding token {contract.text.pad_token!r} has id {pad_id}, "
            f"in the contract {contract.text.pad_id}",
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
    """Tokenize each text and truncate it to `length` tokens, by default the contract's max_length.

    pairs: a second text per text, or None.
    A text without any token of its own gets a `problem`. Raises InputError without texts, for a
    text that is not a string or not valid Unicode, and for a length out of range.
    """
    check_texts(texts, pairs)
    limit = check_length(contract, length)
    before, skipped = contract.vectors.text, 0
    if before and not contract.vectors.include_prompt:
        skipped = count_prompt_tokens(tokenizer, before, limit)
    heads = [tokenizer.head(before + text, limit) for text in texts]
    seconds = pairs and [None if pair is None else tokenizer.head(pair, limit) for pair in pairs]
    encodings = tokenize(tokenizer.cut_at(limit), _to_tokenizer_arguments(heads, seconds))
    shorter = [
        len(head) < len(before) + len(text) or bool(second and pair and len(second) < len(pair))
        for text, head, pair, second in zip(
            texts, heads, pairs or texts, seconds or heads, strict=True
        )
    ]
    unknown = tokenizer.unknown_id
    rows = zip(texts, encodings, shorter, strict=True)
    return [_encoded(*row, unknown, skipped) for row in rows]


def count_prompt_tokens(tokenizer: TextTokenizer, prompt: str, limit: int) -> int:
    """Return how many first tokens of a text belong to its prompt, counted as in
    sentence-transformers.

    These are the tokens of the prompt alone, without a special token at the end.

    limit: maximum tokens of a text
    """
    (encoding,) = tokenize(tokenizer.cut_at(limit), [tokenizer.head(prompt, limit)])
    added = tokenizer.get_added_tokens_decoder()
    last = added.get(encoding.ids[-1]) if encoding.ids else None
    return len(encoding.ids) - int(last is not None and last.special)


def tokenize(tokenizer: Any, rows: list[Any], *, special: bool = True) -> list[Any]:
    """Return the Encoding of each input text or pair. Raises BundleError if the tokenizer fails.

    special: False to add no special tokens around a text.

    A tokenizer without its unknown token fails on texts that need it.
    """
    try:
        return list(tokenizer.encode_batch(rows, add_special_tokens=special))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as e:  # the library raises bare Exception, and panics of Rust
        raise BundleError(f"the tokenizer failed on a text ({e})", where="tokenizer") from None


def _encoded(text: str, encoding: Any, shorter: bool, unknown: int, skipped: int) -> Encoded:
    """Build the encoding of one input text.

    shorter: True if only the beginning of the text was tokenized.
    unknown: id of the unknown token; -1 without one.
    skipped: tokens of the prompt that are left out of the pooling.
    """
    cut = bool(encoding.overflowing) or (shorter and not all(encoding.special_tokens_mask))
    # readable if it was cut, or has more than special tokens
    if cut or not all(encoding.special_tokens_mask):
        unknown = encoding.ids.count(unknown)
        size = len(encoding.ids)
        return Encoded(text, encoding, size, cut, unknown=unknown, skipped=skipped)
    return Encoded(
        text,
        encoding,
        len(encoding.ids),
        problem="the text has no token",
        fix="Give at least one word.",
    )


@dataclass(frozen=True)
class TokenIds:
    """Token ids of an input row, in place of the tokenizer's Encoding.

    offsets: (start, end) of tokens in the text; () if they are not known.
    """

    ids: Sequence[int]
    offsets: Sequence[tuple[int, int]] = ()

    @property
    def attention_mask(self) -> list[int]:
        return [1] * len(self.ids)

    @property
    def type_ids(self) -> list[int]:
        return [0] * len(self.ids)


def encode_ids(
    contract: Contract, tokenizer: TextTokenizer, rows: Sequence[Sequence[int]]
) -> list[Encoded]:
    """Encode rows of token ids of this tokenizer, which include the special tokens around a text.

    Raises InputError for an id that the tokenizer does not have, for a row without those special
    tokens, for more ids than the model reads, and for a model that puts a prompt before each text.
    """
    longest = contract.text.max_length
    if contract.vectors.text:
        raise InputError(
            f"prompt {contract.vectors.prompt!r} stands before each text, and token ids have no "
            "place for it; send texts, or choose a prompt without text",
            where="input",
        )
    encoding = tokenizer.encode("a")
    special = encoding.special_tokens_mask
    first = special.index(0) if 0 in special else len(special)
    last = special[::-1].index(0) if 0 in special else 0
    before, after = encoding.ids[:first], encoding.ids[len(special) - last :]
    for i, row in enumerate(rows):
        where = f"input {i}"
        if list(row[:first]) != before or list(row[len(row) - last :]) != after:
            raise InputError(
                f"its token ids do not have the special tokens of this model around them: {before} "
                f"before and {after} after",
                where=where,
            )
        if not first + last < len(row) <= longest:
            raise InputError(
                f"it has {len(row)} token ids; accepted: {first + last + 1} to {longest}",
                where=where,
            )
        for at, number in enumerate(row):
            if not 0 <= number < 1 << 32 or tokenizer.id_to_token(number) is None:
                raise InputError(f"token id {at} is not in this model's vocabulary", where=where)
    return [Encoded(row, TokenIds(row), len(row)) for row in rows]


def count_full_lengths(
    contract: Contract,
    tokenizer: TextTokenizer,
    texts: Sequence[str],
    pairs: Sequence[str | None] | None = None,
) -> list[int]:
    """Return the number of tokens of each text, with its pair, without truncation.

    Special tokens and the prompt count. Of a text only the first READ_AT_MOST characters are
    counted.
    """
    heads = [(contract.vectors.text + text)[:READ_AT_MOST] for text in texts]
    seconds = pairs and [None if pair is None else pair[:READ_AT_MOST] for pair in pairs]
    return [len(e.ids) for e in tokenize(tokenizer, _to_tokenizer_arguments(heads, seconds))]


def collate(contract: Contract, encoded: Sequence[Encoded], length: int | None = None) -> Batch:
    """Pad encoded texts on the right and join them to one batch.

    Arrays have the names, order and dtypes of the contract's inputs, and the shape (batch,
    sequence).

    length: tokens to pad to; None: those of the longest text, or the contract's padded_to for a
        model that reads padding
    """
    spec = contract.text
    encodings = [e.encoding for e in encoded]
    width = max(e.size for e in encoded) if length is None else length
    width = spec.padded_to or width
    columns = {
        "input_ids": (spec.pad_id, [e.ids for e in encodings]),
        MASK: (int(spec.padded_to is not None), [e.attention_mask for e in encodings]),
        "token_type_ids": (spec.pad_type_id, [e.type_ids for e in encodings]),
    }
    arrays = {}
    for tensor in contract.inputs:
        padding, lists = columns[tensor.name]
        array = np.full((len(lists), width), padding, dtype=tensor.dtype)
        for row, values in zip(array, lists, strict=True):
            row[: len(values)] = values
        arrays[tensor.name] = array
    skipped = [e.skipped for e in encoded]
    return Batch(arrays, [e.input for e in encoded], encodings, real(arrays), skipped=skipped)


def real(arrays: Mapping[str, Array]) -> Array:
    """Return from input arrays the mask of the positions that are not padding, (batch, sequence)
    bool."""
    return np.asarray(arrays[MASK]).astype(bool)


def check_length(contract: Contract, length: int | None) -> int:
    """Return the maximum tokens of an input text: `length`, or the contract's. Raises InputError
    for a length out of range."""
    longest = contract.text.max_length
    if length is not None and not 2 <= length <= longest:
        raise InputError(
            f"{length} tokens were given",
            where="length",
            accepted=f"2 to {longest}, the model's max_length",
        )
    return longest if length is None else length


def check_text(text: object, where: str) -> None:
    """Raises InputError for an input text that is not a string, or a string with a lone surrogate.

    JSON escapes and command-line arguments can contain lone surrogates; tokenizers fail on them.
    """
    if not isinstance(text, str):
        raise InputError(f"{type(text).__name__} was found", where=where, accepted="str")
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise InputError(
            f"character {e.start + 1} is the lone surrogate U+{ord(text[e.start]):04X}",
            where=where,
            accepted="text that can be written as UTF-8",
        ) from None


def check_texts(texts: Sequence[str], pairs: Sequence[str | None] | None) -> None:
    """Raises InputError without input texts, for more or fewer pairs than texts, and as
    check_text."""
    if isinstance(texts, str) or not len(texts):
        raise InputError("a list of at least one text is needed", where="texts")
    if pairs is not None and len(pairs) != len(texts):
        raise InputError(f"{len(pairs)} pairs for {len(texts)} texts", where="pairs")
    for i, text in enumerate(texts):
        check_text(text, f"texts[{i}]")
    for i, pair in enumerate(pairs or ()):
        if pair is not None:
            check_text(pair, f"pairs[{i}]")


def _to_tokenizer_arguments(texts: Sequence[str], pairs: Sequence[str | None] | None) -> list[Any]:
    """Return the texts and pairs as arguments of the tokenizer."""
    if pairs is None:
        return list(texts)
    return [t if p is None else (t, p) for t, p in zip(texts, pairs, strict=True)]


def longest(contract: Contract) -> int:
    """Return the maximum tokens per input text."""
    return contract.text.max_length


def lengthen(texts: Iterable[str], size: int) -> str:
    """Return input texts joined until they have at least `size` words, or no text is left."""
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
    full_sizes=count_full_lengths,
    example='"what a lovely film"',
    size="tokens",
    longest=longest,
    extent=len,
    neutral=lambda _: list(NEUTRAL),
    lengthen=lengthen,
)
