"""Measure whether sharing a batch changes an answer, on this machine, with this model.

A batch's other rows reach an answer in three ways: the order of float sums depends on the shape of
the batch; padding makes a row's own sums longer; and an operator that takes one range over the
whole batch (dynamic quantization per tensor) mixes the rows. Which of them matter depends on the
model and on the runtime's kernels, so nothing is assumed: rows are run alone and together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...inputs.kind import Encoded
from ..model import Answer, Model, difference

ALONE, EQUAL, PADDED = "alone", "equal", "padded"


@dataclass(frozen=True)
class Sharing:
    """Result of `measure_sharing`. how: Model.sharing to set. batches: number of batches compared.
    difference: largest difference between a row's answer in a batch and its answer alone."""

    how: str
    difference: float
    batches: int


def measure_sharing(model: Model, groups: Sequence[Sequence[Encoded]], padded: bool) -> Sharing:
    """Compare rows' answers in shared batches with their answers alone.

    Sharing.how is "padded" with `padded`; else "equal" if no bit of an answer changes, or "alone".

    groups: rows of equal length, one group per length, up to the maximum rows per batch
    padded: rows of all lengths share batches; the difference is measured and accepted
    """
    alone = {id(row): model.run([row])[0] for group in groups for row in group}
    batches = [list(group[:n]) for group in groups for n in range(2, len(group) + 1)]
    if padded:
        batches += [list(rows) for rows in zip(*groups, strict=False) if len(rows) > 1]
    largest = 0.0
    for batch in batches:
        for row, answer in zip(batch, model.run(batch), strict=True):
            largest = max(largest, _difference(alone[id(row)], answer))
        if largest and not padded:
            return Sharing(ALONE, 0.0, len(batches))
    if not batches:
        return Sharing(ALONE, 0.0, 0)
    return Sharing(PADDED if padded else EQUAL, largest, len(batches))


def _difference(alone: Answer | Exception, together: Answer | Exception) -> float:
    if isinstance(alone, Exception) or isinstance(together, Exception):
        return 0.0 if type(alone) is type(together) else float("inf")
    return difference(alone, together)
