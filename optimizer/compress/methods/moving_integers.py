"""Integers that follow a gradient: real numbers, rounded where they are used.

With u (out, in) a weight's real numbers in steps of its scale, its value is round(u) * scale, and
rounding passes the gradient (the straight-through estimator, Bengio et al. 2013, arXiv 1308.3432):
d loss / d u = scale * d loss / d value. u starts at the integers, half a step from any other, and
follows Adam (Kingma and Ba 2015), whose step is at most its rate, in steps of the scale whatever
the scale is. Pruned weights get no gradient, so they stay 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optimizer.qtensor import QTensor


class MovingIntegers:
    """Of one weight. pruned: what equals the zero point stays there.

    betas, epsilon: Adam's.
    """

    def __init__(
        self, start: QTensor, pruned: bool, betas: tuple[float, float], epsilon: float
    ) -> None:
        self.start, self._betas, self._epsilon = start, betas, epsilon
        zero = torch.zeros(()) if start.zero_point is None else self._each(start.zero_point.float())
        self._zero = zero
        self._low, self._high = start.scheme.low - zero, start.scheme.high - zero
        self.u = start.codes.float() - zero
        self._kept = start.nonzero() if pruned else None
        self._first, self._second = torch.zeros_like(self.u), torch.zeros_like(self.u)
        self._steps = 0

    @property
    def codes(self) -> Tensor:
        """(out, in) int8, as they are now."""
        return (self.u.round() + self._zero).to(torch.int8)

    def take_gradient(self, slope: Tensor, scale: Tensor) -> None:
        """slope (out, in): of the loss by the values; scale (out, groups): what they have now."""
        gradient = slope.float() * self._each(scale)
        if self._kept is not None:
            gradient *= self._kept
        self._steps += 1
        self._first.lerp_(gradient, 1 - self._betas[0])
        self._second.mul_(self._betas[1]).addcmul_(gradient, gradient, value=1 - self._betas[1])

    def step(self, rate: float) -> None:
        """Move by at most `rate` steps of the scale, within the scheme's integers."""
        corrected = [1 - beta**self._steps for beta in self._betas]
        lengths = (self._second / corrected[1]).sqrt_().add_(self._epsilon)
        self.u.addcdiv_(self._first, lengths, value=-rate / corrected[0])
        self.u.clamp_(self._low, self._high)

    def _each(self, groups: Tensor) -> Tensor:
        """A value for each weight, of (rows or 1, groups)."""
        out, inputs = self.start.codes.shape
        return groups.expand(out, -1).repeat_interleave(inputs // groups.shape[1], 1)
