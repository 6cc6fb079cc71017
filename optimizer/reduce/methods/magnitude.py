"""Importance of a unit by its weights alone: their squared norm (as in DepGraph, Fang et al. 2023,
arXiv 2301.12900)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def measure_importance(rows: Sequence[Tensor], columns: Tensor, units: int) -> Tensor:
    """Measure the importance of each unit that may be removed: the sum of the squares of its
    weights, (units,).

    rows: weights that compute the units (units * n, in), a unit's n rows adjacent
    columns: weight that reads the units (out, units * m)
    """
    squares = columns.double().square().sum(0).reshape(units, -1).sum(1)
    for weight in rows:
        squares += weight.double().square().reshape(units, -1).sum(1)
    return squares
