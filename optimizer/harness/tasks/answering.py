"""Answer many inputs in batches of similar size, with one answer or error per input, in order.

Batches are formed by size (tokens of a text) over all inputs of a call, because a batch costs the
size of its largest input times its rows. An input that cannot be answered yields its error and does
not stop the others. Used by `predict` and by the server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .. import tasks
from ..contract import Contract
from ..errors import AnswerError, HarnessError, InputError
from . import Array, build_answers, decode

Result = Mapping[str, Any] | AnswerError
"""Answer to a row of the model, or its error."""
WINDOW = 16  # batches that are sorted by size together


@dataclass(frozen=True)
class Query:
    """One input that a task answers.

    where: place of the input in messages, e.g. "line 7".
    pair: second input, or None.
    """

    where: str
    input: Any
    pair: Any = None


@dataclass(frozen=True)
class Answered:
    """Result of a task for one input: its answer or its error.

    tokens: tokens of the text before truncation, special tokens included; None for generation,
        which reports them in its answer, and for inputs that are never truncated.
    kept: tokens of the text after truncation; None where `tokens` is None.
    unknown: kept tokens that the tokenizer does not know.
    """

    where: str
    answer: Mapping[str, Any] | None
    error: HarnessError | None = None
    tokens: int | None = None
    kept: int | None = None
    unknown: int = 0

    @property
    def truncated(self) -> bool:
        return self.tokens != self.kept


@dataclass(frozen=True)
class Predictor:
    """A model of a task that answers a batch in one run.

    encoder: encoder of the model's kind of input, e.g. the tokenizer.
    infer: Runner.infer.
    """

    contract: Contract
    encoder: Any
    infer: Callable[[Mapping[str, Array]], Mapping[str, Array]]


def group_by_length(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Group inputs to answer: lists of row numbers, each a batch of at most `batch_size` rows of
    similar length.

    Rows within a batch, and batches by their first rows, are in ascending order, so that few
    answers wait for a later batch.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    return sorted(sorted(order[i : i + batch_size]) for i in range(0, len(order), batch_size))


def answer(predictor: Predictor, queries: Sequence[Query], batch_size: int) -> Iterator[Answered]:
    """Answer by the model's task: yield an answer or an error for each input, in order, as soon as
    it is available.

    batch_size: maximum inputs per run of the model.
    Raises InputError for inputs of another kind. An AnswerError is yielded as the input's error.
    """
    contract, kind = predictor.contract, tasks.look_up(predictor.contract).inputs
    inputs, pairs = [a.input for a in queries], [a.pair for a in queries]
    encoded = tasks.encode_each(contract, predictor.encoder, inputs, pairs)
    kept: list[int | None] = [None] * len(queries)
    tokens = kept
    if kind.full_sizes is not None:
        counted = [bool(e.side) or not kind.instead for e in encoded]  # of an image none
        kept = [(e.whole or e.size) if c else None for e, c in zip(encoded, counted, strict=True)]
        tokens = list(kept)
        cut = [i for i, e in enumerate(encoded) if e.cut]
        if cut:
            some = [inputs[i] for i in cut], [pairs[i] for i in cut]
            sizes = kind.full_sizes(contract, predictor.encoder, *some)
            for i, size in zip(cut, sizes, strict=True):
                tokens[i] = size
    rows = [part for e in encoded if not e.problem for part in e.parts]
    counts = [0 if e.problem else len(e.parts) for e in encoded]

    def compute(group: Sequence[int]) -> dict[int, Result]:
        batch = kind.collate(contract, [rows[i] for i in group])
        batch.encoder = predictor.encoder
        try:
            values = decode(contract, predictor.infer(batch), batch)
        except AnswerError as e:
            if len(group) == 1:
                return {group[0]: e}
            # run the rows separately to find the failing ones
            return {i: a for row in group for i, a in compute([row]).items()}
        return dict(zip(group, build_answers(contract, values, batch), strict=True))

    def answered(i: int, parts: Sequence[Result]) -> Answered:
        where, one = queries[i].where, encoded[i]
        if one.problem:
            error: HarnessError = InputError(one.problem, where=where, fix=one.fix)
            return Answered(where, None, error, tokens[i], tokens[i])
        failed = [part for part in parts if isinstance(part, AnswerError)]
        if failed:
            error = AnswerError(failed[0].problem, where=f"{where}: {failed[0].where}")
            return Answered(where, None, error, tokens[i], kept[i])
        results = [part for part in parts if not isinstance(part, AnswerError)]
        whole = tasks.look_up(contract).merge(contract, results)
        return Answered(where, whole, None, tokens[i], kept[i], one.unknown)

    sides: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        sides.setdefault(row.side, []).append(i)
    groups = [
        [numbers[i] for i in group]
        for numbers in sides.values()
        for group in group_by_length([rows[i].size for i in numbers], batch_size)
    ]
    ready = _yield_in_order(map(compute, groups), counts)
    return (answered(i, parts) for i, parts in enumerate(ready))


def _yield_in_order(
    batches: Iterator[dict[int, Result]], counts: Sequence[int]
) -> Iterator[list[Result]]:
    """Yield a task's results of each input's rows, in order, as soon as all are there.

    batches: {number of a row: its result} per batch.
    counts: number of rows of each input.
    """
    ready: dict[int, Result] = {}
    at = 0
    for count in counts:
        while any(i not in ready for i in range(at, at + count)):
            ready |= next(batches)
        yield [ready.pop(i) for i in range(at, at + count)]
        at += count
