"""Warm-up of models that answer in one run: run every shape, time it, measure sharing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ... import tasks
from ...errors import BundleError
from ...inputs.kind import Encoded
from ..model import Model
from .latency_model import LatencyModel, measure_latency
from .sharing import ALONE, PADDED, Sharing, measure_sharing

SENTENCES = (
    "The service was quick and the staff could not have been friendlier.",
    "I waited forty minutes for a cold meal, and nobody said a word about it.",
    "It arrived on time; the battery lasts two days, which is what was promised.",
    "After a slow first half the story finds its feet and ends better than it began.",
    "Numbers such as 3.14, 1,024 and 7 % are in many texts, as are names: Ada, Kofi, Li Wei.",
)
SHORTEST = 8  # tokens
Progress = Callable[[str, int, int], None]
"""Function that reports a step: (its description, its number from 1, number of steps)."""


def silent(step: str, number: int, of: int) -> None:
    """Report no progress."""


def lengths(longest: int) -> list[int]:
    """List the lengths to time: 8, 32, 128 ... and the longest."""
    some, length = list[int](), SHORTEST
    while length < longest:
        some.append(length)
        length *= 4
    return [*some, longest]


def rows_of(model: Model, length: int, count: int) -> list[Encoded]:
    """Encode `count` different inputs of `length` tokens; images: the neutral inputs of `bench`."""
    kind, encoder = model.task.inputs, model.predictor.encoder
    if not kind.size:
        neutral = kind.neutral(model.contract)
        some = [neutral[i % len(neutral)] for i in range(count)]
        return kind.encode(model.contract, encoder, some)
    words = " ".join(SENTENCES).split()
    texts = [
        " ".join((words[i % len(words) :] + words) * (1 + 2 * length // len(words)))
        for i in range(0, 7 * count, 7)
    ]
    return kind.encode(model.contract, encoder, texts, None, length)


def warm_up(
    model: Model, rows: int, sharing: str, progress: Progress = silent
) -> tuple[LatencyModel, Sharing]:
    """Set Model.sharing as measured; returns (latency of batches, measured sharing).

    rows: maximum rows per batch
    sharing: "exact", share where no answer changes; "padded", always; "alone", never
    progress: called before each step

    Raises BundleError for a model that does not answer, or gives two answers to one input.
    """
    progress("answer each length twice", 1, 3)
    groups = {n: rows_of(model, n, rows) for n in lengths(tasks.longest(model.contract))}
    _self_check(model, [group[0] for group in groups.values()])
    progress("compare rows alone and in batches", 2, 3)
    how = Sharing(ALONE, 0.0, 0)
    if sharing != ALONE and rows > 1:
        how = measure_sharing(model, list(groups.values()), sharing == PADDED)
    model.sharing = how.how
    progress("time batches", 3, 3)
    counts = [1] if how.how == ALONE else sorted({1, max(1, rows // 2), rows})
    costs = measure_latency(lambda length, n: model.run(groups[length][:n]), list(groups), counts)
    return costs, how


def _self_check(model: Model, rows: Sequence[Encoded]) -> None:
    """Raise BundleError unless each row is answered, twice the same."""
    for row in rows:
        answer = model.run([row])[0]
        if isinstance(answer, Exception):
            raise BundleError(
                f"the model does not answer a warm-up input ({answer})", where=model.name
            )
        if model.run([row])[0] != answer:
            raise BundleError(
                "the model gives two answers to one input",
                where=model.name,
                fix="Choose another engine with deterministic kernels: --runtime.",
            )
