"""Prune a weight by the method of the recipe's sparsity section."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from optimizer.foundation.references import resolve
from optimizer.recipe.compression.sparsity import Sparsity


@dataclass(frozen=True)
class Prunable:
    """Input of a pruning method: one weight, or the stacked weights of modules with one input.

    values: W (out, in)
    damping, act_order: see HessianOptions
    second_moments, cross_moment: H (in, in) and P (in, out) of methods/weights/hessian.py, for a
        calibrated method
    in_place: H and P may be overwritten
    """

    name: str
    values: Tensor
    sparsity: Sparsity
    damping: float
    act_order: bool
    second_moments: Tensor | None = None
    cross_moment: Tensor | None = None
    in_place: bool = False


@dataclass(frozen=True)
class Sparse:
    """Result of pruning a weight: values (out, in), 0 where mask (out, in) is False, and a note for
    the report."""

    values: Tensor
    mask: Tensor
    note: str


def prune(weight: Prunable) -> Sparse:
    """Prune by the method weight.sparsity.method. Raises ValueError as that method does."""
    sparse: Sparse = resolve(weight.sparsity.record.apply)(weight)
    return sparse


def label(sparsity: Sparsity) -> str:
    """Name the pruning of a weight in the report: "2:4 by wanda"."""
    return f"{sparsity.shape} by {sparsity.method}"
