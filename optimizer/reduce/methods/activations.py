"""Importance of a unit by its contribution to the output of its layer.

Minitron (Muralidharan et al. 2024, arXiv 2407.14679) uses the activation alone; here it is
multiplied by the norm of the column that reads it, so that a large activation that no weight reads
does not count."""

from __future__ import annotations

from torch import Tensor


def measure_importance(mean_absolute: Tensor, columns: Tensor, units: int) -> Tensor:
    """Measure the importance of each unit that may be removed, (units,): the sum over its inputs of
    mean |x_j| * |W_j|.

    mean_absolute: mean over tokens of the layer's |inputs| (in,)
    columns: weight of the layer (out, in)
    units: number of units, groups of adjacent inputs of equal size
    """
    contribution = mean_absolute.double() * columns.double().norm(dim=0)
    summed: Tensor = contribution.reshape(units, -1).sum(1)
    return summed
