"""Prune a weight by the method of the recipe's sparsity section, whatever becomes of the rest."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from optimizer.foundation.references import resolve
from optimizer.recipe.compression.sparsity import Sparsity


@dataclass(frozen=True)
class Prunable:
    """What a method of sparsity gets: one weight, or several that read one input, row below row.

    values: W (out, in), folded. sparsity: the recipe's section. second_moments, cross_moment: H
    (in, in) and P (in, out) of methods/weights/hessian.py, only for a method that looks at
    activations. damping, act_order: of the one Hessian. in_place: H and P may be overwritten.
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
    """values (out, in), 0 where mask (out, in) is False; note: what the report says."""

    values: Tensor
    mask: Tensor
    note: str


def pruned(weight: Prunable) -> Sparse:
    """By the method that the section names. Raises ValueError as the method does."""
    sparse: Sparse = resolve(weight.sparsity.record.apply)(weight)
    return sparse


def label(sparsity: Sparsity) -> str:
    """ "2:4 by wanda": in the report's words."""
    return f"{sparsity.shape} by {sparsity.method}"
