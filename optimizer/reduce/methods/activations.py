"""Importance by what a unit adds to the output of its layer (Minitron, Muralidharan et al. 2024,
arXiv 2407.14679, which takes the activation alone; here times the norm of the column that reads
it, without which a large activation that nothing reads would count)."""

from __future__ import annotations

from torch import Tensor


def importance(mean_absolute: Tensor, columns: Tensor, units: int) -> Tensor:
    """(units,): sum over a unit's inputs of mean |x_j| * |W_j|.

    mean_absolute (in,): of the layer's inputs over tokens; columns (out, in): its weight.
    """
    contribution = mean_absolute.double() * columns.double().norm(dim=0)
    summed: Tensor = contribution.reshape(units, -1).sum(1)
    return summed
