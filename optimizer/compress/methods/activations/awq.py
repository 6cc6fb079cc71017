"""AWQ (Lin et al. 2023, arXiv 2306.00978): scale up the weights of inputs with large activations.

Column j of the consumers' W is multiplied by s_j and output j of the producer divided by it, which
changes only the relative rounding error of the column:

    s_j = s_X ** alpha                             s_X = mean|X_j|
    s_j = s_X ** alpha / s_W ** (1 - alpha)        s_W = mean|W_j|

The kind of s and alpha are searched by the output error of the quantized consumers, over all
tokens: sum |X E^T|^2 = tr E H E^T. smoothquant.fold_producer and fold_consumer fold s;
scale_search.py searches the clipping.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optimizer.compress.methods.activations.shared_heads import SharedHeads

ALPHAS = tuple(i / 10 for i in range(1, 7))  # no layer of a real model chose more
SMALLEST = 1e-8  # mean magnitude below which an input is not scaled

Quantizer = Callable[[Tensor, Tensor], Tensor]
"""(W (out, in), importance (in,) as in rtn.search_scales) -> W quantized and de-quantized."""


@dataclass(frozen=True)
class Choice:
    """Scales of one quantized input that AWQ's search found.

    s: (in,)
    alpha: None where s is ones, because no alpha lowers the error
    by_weight: True for scales with s_W
    error, unscaled: summed output error with s, and with ones
    """

    s: Tensor
    alpha: float | None
    by_weight: bool
    error: float
    unscaled: float


def compute_factors(s_X: Tensor, s_W: Tensor | None, alpha: float) -> Tensor:
    """Compute AWQ's scales s (in,), positive, with a geometric mean of 1 over the inputs that are
    scaled.

    s_X: (in,), mean|X_j|
    s_W: (in,), mean|W_j|, or None for scales without it
    """
    usable = s_X > SMALLEST
    if s_W is not None:
        usable &= s_W > SMALLEST
    if not bool(usable.any()):
        return torch.ones_like(s_X)
    logs = alpha * s_X.double().clamp_min(SMALLEST).log()
    if s_W is not None:
        logs = logs - (1 - alpha) * s_W.double().clamp_min(SMALLEST).log()
    return torch.where(usable, logs - logs[usable].mean(), torch.zeros_like(logs)).exp().float()


def search(
    weights: Sequence[Tensor],
    H: Tensor,
    s_X: Tensor,
    quantize: Quantizer,
    *,
    shared: SharedHeads | None = None,
    alphas: Sequence[float] = ALPHAS,
) -> Choice:
    """Search AWQ's scales s with the least output error of all consumers together; ones if no s
    lowers it.

    weights: W (out, in) of each consumer
    H: (in, in), X^T X summed over tokens
    s_X: (in,), mean|X_j|

    Raises ValueError for NaN or infinity in a statistic.
    """
    for name, statistic in (("hessian", H), ("activation", s_X)):
        if not bool(torch.isfinite(statistic).all()):
            raise ValueError(f"{name}: holds NaN or infinity")
    importance = H.diagonal()
    s_W = torch.cat([w.abs() for w in weights]).mean(0)

    def error(s: Tensor) -> float:
        total = 0.0
        for w in weights:
            E = quantize(w * s, importance / s.square()) / s - w
            total += float(((E @ H) * E).double().sum())
        return total

    ones = torch.ones_like(s_X)
    unscaled = error(ones)
    best = Choice(ones, None, False, unscaled, unscaled)
    for by_weight in (False, True):
        for alpha in alphas:
            s = compute_factors(s_X, s_W if by_weight else None, alpha)
            if shared is not None:
                s = shared.of_consumer(shared.of_producer(s.log()).exp())
            if (now := error(s)) < best.error:
                best = Choice(s, alpha, by_weight, now, unscaled)
    return best
