"""Texts to answers, one for each and in their order, however they are put together on the way.

Batches are formed by length, over all the texts given at once: a batch costs what its longest text
costs times its rows, so long and short ones are kept apart. A text that cannot be answered has its
error in its place and stops no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from .contract import Contract
from .errors import AnswerError, HarnessError
from .tasks import Array, answers, decode
from .tasks.batch import has_tokens, no_tokens, pad, tokenize, whole_lengths

WINDOW = 16  # batches whose texts are looked at together: enough to find alike ones, soon read


@dataclass(frozen=True)
class Asked:
    """One text to answer. where: what a message calls it, "line 7"."""

    where: str
    text: str
    pair: str | None = None


@dataclass(frozen=True)
class Answered:
    """What became of one text: its answer, or the error that stands in its place.

    tokens: how many the text has, special tokens included; None where that is part of the answer.
    kept: how many of them the model read.
    """

    where: str
    answer: Mapping[str, Any] | None
    error: HarnessError | None = None
    tokens: int | None = None
    kept: int | None = None

    @property
    def truncated(self) -> bool:
        return self.tokens != self.kept


@dataclass(frozen=True)
class Encoder:
    """A model that answers a batch in one run. infer: Runner.infer."""

    contract: Contract
    tokenizer: Any
    infer: Callable[[Mapping[str, Array]], Mapping[str, Array]]


def by_length(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Numbers of the rows that run together: at most `size` of neighbouring lengths.

    Rows of a batch are in order, and batches in the order of their first rows, so that few answers
    wait for a later batch.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    return sorted(sorted(order[i : i + size]) for i in range(0, len(order), size))


def answer(encoder: Encoder, asked: Sequence[Asked], batch_size: int) -> Iterator[Answered]:
    """An answer or an error for each text, in order, each as soon as those before it are there.

    Raises InputError as tokenize does, AnswerError never: that is the text's error.
    """
    texts, pairs = [a.text for a in asked], [a.pair for a in asked]
    encodings = tokenize(encoder.contract, encoder.tokenizer, texts, pairs)
    tokens = [len(e.ids) for e in encodings]
    cut = [i for i, e in enumerate(encodings) if e.overflowing]
    if cut:
        whole = whole_lengths(encoder.tokenizer, [texts[i] for i in cut], [pairs[i] for i in cut])
        for i, length in zip(cut, whole, strict=True):
            tokens[i] = length
    silent = [i for i, e in enumerate(encodings) if not has_tokens(e)]
    rest = [i for i, e in enumerate(encodings) if has_tokens(e)]
    refused = {
        i: Answered(asked[i].where, None, no_tokens(asked[i].where), tokens[i], tokens[i])
        for i in silent
    }

    def computed(rows: Sequence[int]) -> dict[int, Answered]:
        batch = pad(encoder.contract, [texts[i] for i in rows], [encodings[i] for i in rows])
        try:
            values = decode(encoder.contract, encoder.infer(batch), batch)
        except AnswerError as e:
            if len(rows) > 1:  # whose fault it is shows when each is alone
                return {i: a for row in rows for i, a in computed([row]).items()}
            (i,) = rows
            error = AnswerError(e.found, where=f"{asked[i].where}: {e.where}")
            return {i: Answered(asked[i].where, None, error, tokens[i], len(encodings[i].ids))}
        made = answers(encoder.contract, values, batch)
        return {
            i: Answered(asked[i].where, a, None, tokens[i], len(encodings[i].ids))
            for i, a in zip(rows, made, strict=True)
        }

    groups = by_length([len(encodings[i].ids) for i in rest], batch_size)
    parts = (computed([rest[i] for i in group]) for group in groups)
    return _in_order(chain([refused], parts))


def _in_order(parts: Iterator[dict[int, Answered]]) -> Iterator[Answered]:
    """Numbered answers from 0 on, each once those before it have come."""
    ready: dict[int, Answered] = {}
    at = 0
    for part in parts:
        ready |= part
        while at in ready:
            yield ready.pop(at)
            at += 1
