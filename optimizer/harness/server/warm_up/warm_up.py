"""Before the first request: every shape is run once, timed, and compared with its rows alone."""

from __future__ import annotations

from collections.abc import Sequence

from ... import tasks
from ...errors import BundleError
from ...inputs.kind import Encoded
from ..model import Model
from .costs import Costs, measured
from .exactness import ALONE, PADDED, Sharing
from .exactness import measured as measured_sharing

SENTENCES = (
    "The service was quick and the staff could not have been friendlier.",
    "I waited forty minutes for a cold meal, and nobody said a word about it.",
    "It arrived on time; the battery lasts two days, which is what was promised.",
    "After a slow first half the story finds its feet and ends better than it began.",
    "Numbers such as 3.14, 1,024 and 7 % are in many texts, as are names: Ada, Kofi, Li Wei.",
)
SHORTEST = 8  # tokens


def lengths(longest: int) -> list[int]:
    """The lengths that are timed: 8, 32, 128 ... and the longest."""
    some, length = list[int](), SHORTEST
    while length < longest:
        some.append(length)
        length *= 4
    return [*some, longest]


def rows_of(model: Model, length: int, count: int) -> list[Encoded]:
    """So many different inputs of this size; of images those that any model is timed on."""
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


def warm_up(model: Model, rows: int, sharing: str) -> tuple[Costs, Sharing]:
    """What batches cost, and how rows share them; Model.sharing is set. rows: of a batch.

    sharing: "exact", only where it changes no answer; "padded", whatever it changes; "alone".
    Raises BundleError for a model that does not answer, or not the same twice.
    """
    groups = {n: rows_of(model, n, rows) for n in lengths(tasks.longest(model.contract))}
    _self_check(model, [group[0] for group in groups.values()])
    how = Sharing(ALONE, 0.0, 0)
    if sharing != ALONE and rows > 1:
        how = measured_sharing(model, list(groups.values()), sharing == PADDED)
    model.sharing = how.how
    counts = [1] if how.how == ALONE else sorted({1, max(1, rows // 2), rows})
    costs = measured(lambda length, n: model.run(groups[length][:n]), list(groups), counts)
    return costs, how


def _self_check(model: Model, rows: Sequence[Encoded]) -> None:
    """Each row is answered, and the same again as a `predict` of its text would be."""
    for row in rows:
        answer = model.run([row])[0]
        if isinstance(answer, Exception):
            raise BundleError(f"it does not answer ({answer})", where=model.name)
        if model.run([row])[0] != answer:
            raise BundleError(
                "it answers one input in two ways",
                where=model.name,
                fix="Take another engine (--runtime), whose kernels are deterministic.",
            )
