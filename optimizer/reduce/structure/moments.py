"""Sums of first and second moments of a layer's inputs over tokens, in the smaller and in the float
model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Moments:
    """Sums over real tokens, by which units are removed: inputs x in the smaller model and f in the
    float one.

    hessian: sum of x x^T (in, in)
    cross: sum of f x^T (in, in)
    absolute, x_sum, f_sum: sums of |x|, x and f, (in,) float64
    """

    hessian: Tensor
    cross: Tensor
    absolute: Tensor
    x_sum: Tensor
    f_sum: Tensor
    tokens: int = 0

    @staticmethod
    def empty(width: int, *, products: bool) -> Moments:
        """Return sums over no tokens, for a layer that is to lose units.

        width: number of inputs of the layer
        products: True to sum hessian and cross as well
        """
        side = width if products else 0
        first, second = (torch.zeros(side, side) for _ in range(2))
        a, b, c = (torch.zeros(width, dtype=torch.float64) for _ in range(3))
        return Moments(first, second, a, b, c)

    def add(self, x: Tensor, f: Tensor | None) -> None:
        """Add the inputs of some tokens to the sums of a layer that is to lose units.

        x: inputs in the smaller model (tokens, in), float32
        f: inputs in the float model (tokens, in), float32; None: hessian and cross are not summed
        """
        self.tokens += len(x)
        self.absolute += x.abs().double().sum(0)
        self.x_sum += x.double().sum(0)
        if f is not None:
            self.f_sum += f.double().sum(0)
            self.hessian.addmm_(x.T, x)
            self.cross.addmm_(f.T, x)

    def products(self, *, centered: bool) -> tuple[Tensor, Tensor]:
        """Compute (hessian, cross), the products of the inputs that a least-squares fit reads, in
        float64.

        centered: True for moments about the means, for a layer whose bias corrects the mean output
        """
        H, C = self.hessian.double(), self.cross.double()
        if not centered:
            return H, C
        mean = self.x_sum / self.tokens
        return H - torch.outer(self.x_sum, mean), C - torch.outer(self.f_sum, mean)

    def bias(self, before: Tensor, weight: Tensor, adjusted: Tensor, kept: Tensor) -> Tensor:
        """Return the bias (out,) that keeps the mean output: b + W mean(f) - V mean(x_k).

        before: b (out,)
        weight: W (out, in)
        adjusted: V (out, kept)
        kept: columns of W that V has
        """
        moved = weight.double() @ self.f_sum - adjusted.double() @ self.x_sum[kept]
        return before.double() + moved / self.tokens
