"""Measure whether sharing a batch changes an answer, on this machine, with this model.

A batch's other rows reach an answer in three ways: the order of float sums depends on the shape of
the batch; padding makes a row's own sums longer; and an operator that takes one range over the
whole batch (dynamic quantization per tensor) mixes the rows. Which of them matter depends on the
model and on the runtime's kernels, so nothing is assumed: rows are run alone and together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ...inputs.kind import Encoded
from ..model import Answer, ServedModel, difference

ALONE, EQUAL, PADDED = "alone", "equal", "padded"
LONG = 128  # tokens from which any batch has more rows of a matrix than the tile of a kernel


@dataclass(frozen=True)
class Sharing:
    """Result of `measure_sharing`: if rows of requests may share a batch.

    how: value for ServedModel.sharing
    batches: number of batches compared
    difference: largest difference between a row's answer in a batch and its answer alone
    """

    how: str
    difference: float
    batches: int


def sizes(tokens: int, rows: int) -> list[int]:
    """Return the numbers of rows that the warm-up compares at a length.

    These are 2 and more, or from LONG tokens on 2, 3, half of the maximum and the maximum.

    rows: maximum rows per batch
    """
    return [n for n in range(2, rows + 1) if tokens < LONG or n in (2, 3, rows // 2, rows)]


def measure_sharing(
    model: ServedModel,
    groups: Mapping[int, Sequence[Encoded]],
    padded: bool,
    progress: Callable[[int], None],
) -> Sharing:
    """Compare in a server's warm-up rows' answers in shared batches with their answers alone.

    Sharing.how is "padded" with `padded`; else "equal" if no bit of an answer changes, or "alone".

    groups: {tokens: rows of that length, up to the maximum rows per batch}
    padded: rows of all lengths share batches; the difference is measured and accepted
    progress: called with each length before it is compared
    """
    alone: dict[int, Answer | Exception] = {}
    largest, count = 0.0, 0
    for tokens, group in groups.items():
        progress(tokens)
        alone |= {id(row): model.run([row])[0] for row in group}
        for rows in sizes(tokens, len(group)):
            largest, count = (
                max(largest, _measure_difference(model, group[:rows], alone)),
                count + 1,
            )
            if largest and not padded:
                return Sharing(ALONE, 0.0, count)
    sides = dict.fromkeys(group[0].side for group in groups.values())
    for side in sides if padded else ():
        for batch in zip(*(g for g in groups.values() if g[0].side == side), strict=False):
            if len(batch) > 1:
                largest, count = max(largest, _measure_difference(model, batch, alone)), count + 1
    if not count:
        return Sharing(ALONE, 0.0, 0)
    return Sharing(PADDED if padded else EQUAL, largest, count)


def _measure_difference(
    model: ServedModel, batch: Sequence[Encoded], alone: Mapping[int, Answer | Exception]
) -> float:
    """Return for the warm-up the largest difference between rows' answers in a batch and their
    answers alone."""
    answers = zip(batch, model.run(list(batch)), strict=True)
    return max(_difference(alone[id(row)], answer) for row, answer in answers)


def _difference(alone: Answer | Exception, together: Answer | Exception) -> float:
    if isinstance(alone, Exception) or isinstance(together, Exception):
        return 0.0 if type(alone) is type(together) else float("inf")
    return difference(alone, together)
