"""Inputs to answers, one for each and in their order, however they are put together on the way.

Batches are formed by size (of texts: their length in tokens), over all the inputs given at once: a
batch costs what its largest costs times its rows, so large and small ones are kept apart. An input
that cannot be answered has its error in its place and stops no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from .. import tasks
from ..contract import Contract
from ..errors import AnswerError, HarnessError, InputError
from . import Array, answers, decode

WINDOW = 16  # batches whose inputs are looked at together: enough to find alike ones, soon read


@dataclass(frozen=True)
class Query:
    """One input to answer. where: what a message calls it, "line 7". pair: its second input."""

    where: str
    input: Any
    pair: Any = None


@dataclass(frozen=True)
class Answered:
    """What became of one input: its answer, or the error that stands in its place.

    tokens: how many a text has, special tokens included; None where that is part of the answer,
    and of inputs that are never cut. kept: how many of them the model read.
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
class Predictor:
    """A model that answers a batch in one run. encoder: what its kind of input opened, of text the
    tokenizer. infer: Runner.infer."""

    contract: Contract
    encoder: Any
    infer: Callable[[Mapping[str, Array]], Mapping[str, Array]]


def by_length(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Numbers of the rows that run together: at most `size` of neighbouring lengths.

    Rows of a batch are in order, and batches in the order of their first rows, so that few answers
    wait for a later batch.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    return sorted(sorted(order[i : i + size]) for i in range(0, len(order), size))


def answer(predictor: Predictor, queries: Sequence[Query], batch_size: int) -> Iterator[Answered]:
    """An answer or an error for each input, in order, each as soon as those before it are there.

    Raises InputError as the kind's encode does, AnswerError never: that is the input's error.
    """
    contract, kind = predictor.contract, tasks.of(predictor.contract).inputs
    inputs, pairs = [a.input for a in queries], [a.pair for a in queries]
    encoded = kind.encode(contract, predictor.encoder, inputs, pairs)
    kept: list[int | None] = [None] * len(queries)
    tokens = kept
    if kind.whole_sizes is not None:
        kept = [e.size for e in encoded]
        tokens = list(kept)
        cut = [i for i, e in enumerate(encoded) if e.cut]
        if cut:
            some = [inputs[i] for i in cut], [pairs[i] for i in cut]
            for i, size in zip(cut, kind.whole_sizes(predictor.encoder, *some), strict=True):
                tokens[i] = size
    rest = [i for i, e in enumerate(encoded) if not e.problem]
    refused = {
        i: Answered(
            queries[i].where,
            None,
            InputError(e.problem, where=queries[i].where, fix=e.fix),
            tokens[i],
            tokens[i],
        )
        for i, e in enumerate(encoded)
        if e.problem
    }

    def computed(rows: Sequence[int]) -> dict[int, Answered]:
        batch = kind.collate(contract, [encoded[i] for i in rows])
        try:
            values = decode(contract, predictor.infer(batch), batch)
        except AnswerError as e:
            if len(rows) > 1:  # whose fault it is shows when each is alone
                return {i: a for row in rows for i, a in computed([row]).items()}
            (i,) = rows
            error = AnswerError(e.problem, where=f"{queries[i].where}: {e.where}")
            return {i: Answered(queries[i].where, None, error, tokens[i], kept[i])}
        results = answers(contract, values, batch)
        return {
            i: Answered(queries[i].where, a, None, tokens[i], kept[i])
            for i, a in zip(rows, results, strict=True)
        }

    groups = by_length([encoded[i].size for i in rest], batch_size)
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
