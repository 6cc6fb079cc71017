"""Warm-up of models that answer in one run: run every shape, time it, measure sharing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

from ... import tasks
from ...errors import BundleError
from ...inputs.kind import Encoded
from ..model import ServedModel
from .latency_model import REPEATS, LatencyModel, measure_latency
from .sharing import ALONE, PADDED, Sharing, measure_sharing, sizes

SENTENCES = (
    "The service was quick and the staff could not have been friendlier.",
    "I waited forty minutes for a cold meal, and nobody said a word about it.",
    "It arrived on time; the battery lasts two days, which is what was promised.",
    "After a slow first half the story finds its feet and ends better than it began.",
    "Numbers such as 3.14, 1,024 and 7 % are in many texts, as are names: Ada, Kofi, Li Wei.",
)
SHORTEST = 8  # tokens
CHECK, COMPARE, TIME = "answer twice", "compare rows alone and in batches", "time batches"
Progress = Callable[[str, int, int, float | None], None]
"""Function that reports a step: (its description, its number from 1, number of steps, predicted
seconds until all are done or None)."""


def silent(step: str, number: int, of: int, seconds: float | None) -> None:
    """Ignore a step of the warm-up, where nobody reads the progress."""


class WarmUpProgress:
    """Progress of a warm-up, whose steps each run one kind and length.

    tokens: {(kind, length): tokens that the step runs}, in order

    The time left is predicted from the tokens that were run and the time that they took.
    """

    def __init__(
        self,
        tokens: Mapping[tuple[str, int], int],
        progress: Progress,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._tokens, self._progress, self._clock = tokens, progress, clock
        self._begun, self._started = clock(), list[tuple[str, int]]()

    def start(self, kind: str, length: int) -> None:
        """Report a step of the warm-up that begins; the time left once each length has been run."""
        keys = list(self._tokens)
        at, done = keys.index((kind, length)), sum(self._tokens[key] for key in self._started)
        left = sum(self._tokens[key] for key in keys[at:])
        seconds = None if kind == CHECK else (self._clock() - self._begun) * left / done
        self._started.append((kind, length))
        self._progress(f"{kind}: length {length}", at + 1, len(keys), seconds)


def lengths_of(model: ServedModel) -> list[int]:
    """List the lengths that a server's warm-up times: of images 1, of texts those of `lengths`."""
    texts, own = model.contract.texts, lengths(tasks.longest(model.contract))
    return own if texts is None else [*own, *lengths(texts.text.max_length)]


def lengths(max_length: int) -> list[int]:
    """List the lengths that a server's warm-up times: 8, 32, 128 ... and `max_length`."""
    some, length = list[int](), SHORTEST
    while length < max_length:
        some.append(length)
        length *= 4
    return [*some, max_length]


def rows_of(model: ServedModel, length: int, count: int) -> list[Encoded]:
    """Encode, for the warm-up, `count` different inputs of `length` tokens; images: the neutral
    inputs of `bench`."""
    kind, encoder = model.task.inputs, model.predictor.encoder
    if not kind.size and length == 1:
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
    model: ServedModel, rows: int, sharing: str, progress: Progress = silent
) -> tuple[LatencyModel, Sharing]:
    """Measure a server's model in its warm-up and set ServedModel.sharing; return (latency of
    batches, measured sharing).

    rows: maximum rows per batch
    sharing: "exact", share batches if no answer changes; "padded", always; "alone", never
    progress: function that is called before each step

    Raises BundleError for a model that does not answer, or gives two answers to one input.
    """
    groups = {n: rows_of(model, n, rows) for n in lengths_of(model)}
    compared = sharing != ALONE and rows > 1
    runs = {CHECK: dict.fromkeys(groups, 2)}
    if compared:
        runs[COMPARE] = {n: rows + sum(sizes(n, rows)) for n in groups}
    counts = sorted({1, max(1, rows // 2), rows})
    runs[TIME] = dict.fromkeys(groups, REPEATS * sum(counts))
    tokens = {(kind, n): n * count for kind, many in runs.items() for n, count in many.items()}
    steps = WarmUpProgress(tokens, progress)
    for length, group in groups.items():
        steps.start(CHECK, length)
        _self_check(model, group[0])
    how = Sharing(ALONE, 0.0, 0)
    if compared:
        how = measure_sharing(model, groups, sharing == PADDED, partial(steps.start, COMPARE))
    model.sharing = how.how
    costs = measure_latency(
        lambda length, n: model.run(groups[length][:n]),
        list(groups),
        [1] if how.how == ALONE else counts,
        progress=partial(steps.start, TIME),
    )
    return costs, how


def _self_check(model: ServedModel, row: Encoded) -> None:
    """Check the model in the warm-up: raise BundleError if a row is not answered, or gets another
    answer in a second run."""
    answer = model.run([row])[0]
    if isinstance(answer, Exception):
        raise BundleError(f"the model does not answer a warm-up input ({answer})", where=model.name)
    if model.run([row])[0] != answer:
        raise BundleError(
            "the model gives two answers to one input",
            where=model.name,
            fix="Choose another engine with deterministic kernels: --runtime.",
        )
