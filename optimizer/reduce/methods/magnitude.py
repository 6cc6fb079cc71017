"""Importance by weights alone: the squared norm of everything that goes with a unit (as in
DepGraph, Fang et al. 2023, arXiv 2301.12900)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def importance(rows: Sequence[Tensor], columns: Tensor, units: int) -> Tensor:
    """(units,): the sum of the squares of a unit's weights.

    rows: weights (units * n, in), a unit's n rows side by side; columns (out, units * m): the
    weight that reads the units.
    """
    squares = columns.double().square().sum(0).reshape(units, -1).sum(1)
    for weight in rows:
        squares += weight.double().square().reshape(units, -1).sum(1)
    return squares
