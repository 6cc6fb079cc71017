"""AWQ (Lin et al. 2023, arXiv 2306.00978): scale up the weights that large activations meet.

The consumers' input column j is multiplied by s[j] and the producer's output divided by it, which
changes nothing but the relative error that rounding makes in the column:

    s[j] = mean|x[:, j]| ** a                               plain
    s[j] = mean|x[:, j]| ** a / mean|W[:, j]| ** (1 - a)    weighing in the weights

The form and a are those with the least output error of the coded consumers. The error is exact
over all tokens, through H: sum over them of |x D^T|^2 = tr D H D^T. Folding is smoothquant's
fold_producer and fold_consumer; afterwards H is `rescaled`. Clipping is scale_search's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optimizer.compress.methods.activations.shared_heads import SharedHeads

RATIOS = tuple(i / 10 for i in range(1, 7))  # no layer of a real model chose more
SMALLEST = 1e-8  # of a mean magnitude: below it the input carries nothing and is left alone

# a weight (out, in) and what a squared error costs at each of its inputs (in,), which are the
# arguments of rtn.searched -> what its codes say it is
Code = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Choice:
    """s (in,) of the consumers' inputs; ratio None: ones, because no a lowers the error. error is
    the summed output error with s, unscaled the one with ones."""

    s: Tensor
    ratio: float | None
    by_weight: bool
    error: float
    unscaled: float


def factors(activation: Tensor, weight: Tensor | None, ratio: float) -> Tensor:
    """s (in,), positive, with a geometric mean of 1 over the inputs that carry anything.

    activation (in,): mean|x|; weight (in,): mean|W|, or None for the plain form.
    """
    usable = activation > SMALLEST
    if weight is not None:
        usable &= weight > SMALLEST
    if not bool(usable.any()):
        return torch.ones_like(activation)
    logs = ratio * activation.double().clamp_min(SMALLEST).log()
    if weight is not None:
        logs = logs - (1 - ratio) * weight.double().clamp_min(SMALLEST).log()
    return torch.where(usable, logs - logs[usable].mean(), torch.zeros_like(logs)).exp().float()


def search(
    weights: Sequence[Tensor],
    hessian: Tensor,
    activation: Tensor,
    code: Code,
    *,
    shared: SharedHeads | None = None,
    ratios: Sequence[float] = RATIOS,
) -> Choice:
    """The s with the least output error of all consumers together.

    weights (out, in) each, of one input; hessian (in, in), x^T x summed over tokens; activation
    (in,), mean|x|; code, e.g. rtn.searched and back. Never worse than not scaling. Raises
    ValueError for NaN or infinity in a statistic.
    """
    for name, statistic in (("hessian", hessian), ("activation", activation)):
        if not bool(torch.isfinite(statistic).all()):
            raise ValueError(f"{name}: holds NaN or infinity")
    importance = hessian.diagonal()
    magnitude = torch.cat([w.abs() for w in weights]).mean(0)

    def error(s: Tensor) -> float:
        total = 0.0
        for w in weights:
            d = code(w * s, importance / s.square()) / s - w
            total += float(((d @ hessian) * d).double().sum())
        return total

    ones = torch.ones_like(activation)
    unscaled = error(ones)
    best = Choice(ones, None, False, unscaled, unscaled)
    for by_weight in (False, True):
        for ratio in ratios:
            s = factors(activation, magnitude if by_weight else None, ratio)
            if shared is not None:
                s = shared.of_consumer(shared.of_producer(s.log()).exp())
            if (now := error(s)) < best.error:
                best = Choice(s, ratio, by_weight, now, unscaled)
    return best


def rescaled(hessian: Tensor, s: Tensor) -> Tensor:
    """H of the inputs after they were divided by s: rounding methods that follow get these."""
    return hessian / s[:, None] / s[None, :]
