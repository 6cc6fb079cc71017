"""Sums over the tokens that enter a layer, in the smaller and in the float model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Moments:
    """Over real tokens: x in the smaller model, f in the float one. Empty until `add`.

    hessian: sum of x x^T (in, in); cross: of f x^T; absolute, x_sum, f_sum (in,) float64: of |x|, x
    and f.
    """

    hessian: Tensor
    cross: Tensor
    absolute: Tensor
    x_sum: Tensor
    f_sum: Tensor
    tokens: int = 0

    @staticmethod
    def empty(width: int, *, products: bool) -> Moments:
        """products: whether hessian and cross are summed as well."""
        side = width if products else 0
        first, second = (torch.zeros(side, side) for _ in range(2))
        a, b, c = (torch.zeros(width, dtype=torch.float64) for _ in range(3))
        return Moments(first, second, a, b, c)

    def add(self, x: Tensor, f: Tensor | None) -> None:
        """x, f (tokens, in) float32; f None: no products."""
        self.tokens += len(x)
        self.absolute += x.abs().double().sum(0)
        self.x_sum += x.double().sum(0)
        if f is not None:
            self.f_sum += f.double().sum(0)
            self.hessian.addmm_(x.T, x)
            self.cross.addmm_(f.T, x)

    def products(self, *, centered: bool) -> tuple[Tensor, Tensor]:
        """(hessian, cross) float64; centered: about the means, which is what is left to the weights
        of a layer whose bias makes up for the means."""
        H, C = self.hessian.double(), self.cross.double()
        if not centered:
            return H, C
        mean = self.x_sum / self.tokens
        return H - torch.outer(self.x_sum, mean), C - torch.outer(self.f_sum, mean)

    def bias(self, before: Tensor, weight: Tensor, adjusted: Tensor, kept: Tensor) -> Tensor:
        """The bias with which the mean output stays: b + W mean(f) - V mean(x_k). before b (out,);
        weight W (out, in); adjusted V (out, kept); kept: its columns."""
        moved = weight.double() @ self.f_sum - adjusted.double() @ self.x_sum[kept]
        return before.double() + moved / self.tokens
