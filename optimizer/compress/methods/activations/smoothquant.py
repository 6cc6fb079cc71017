"""SmoothQuant (Xiao et al. 2022, arXiv 2211.10438): move outliers from activations to weights.

A few channels of an activation are often far larger than the others and set the step for all. The
producer's output channel j is divided by s_j and column j of the consumers' W multiplied by it:

    Y = X W^T = (X / s) (W s)^T            s_j = max|X_j| ** alpha / max|W_j| ** (1 - alpha)

so the function is unchanged (up to float rounding) and only the quantization error moves.
alpha = 0.5 splits it evenly, 1 moves all of it to the weights; `search` measures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

ALPHAS = tuple(i / 10 for i in range(11))
SMALLEST = 1e-5  # magnitude below which a channel is not scaled

Quantizer = Callable[[Tensor], Tensor]
"""A tensor, quantized and de-quantized."""


def compute_factors(X_max: Tensor, W_max: Tensor, alpha: float) -> Tensor:
    """Compute SmoothQuant's factors s (features,), positive and finite, with a geometric mean of 1.

    X_max, W_max: (features,), max|X_j| and max|W_j|; a channel that is empty in either is not
        scaled

    The common factor keeps the folded numbers in the float formats' normal range and has no other
    effect.
    """
    usable = (X_max > SMALLEST) & (W_max > SMALLEST)
    x = torch.where(usable, X_max, torch.ones_like(X_max)).double()
    w = torch.where(usable, W_max, torch.ones_like(W_max)).double()
    logs = alpha * x.log() - (1 - alpha) * w.log()
    logs = torch.where(usable, logs - logs[usable].mean(), torch.zeros_like(logs))
    return logs.exp().float()


def fold_producer(parameter: Tensor, s: Tensor, rows: slice = slice(None)) -> Tensor:
    """Fold smoothing factors: divide `rows` of the producer's weight (out, in) or (out,), or of its
    bias (out,), by s."""
    folded = parameter.clone()
    folded[rows] = parameter[rows] / (s[:, None] if parameter.ndim == 2 else s)
    return folded


def fold_consumer(weight: Tensor, s: Tensor) -> Tensor:
    """Fold smoothing factors: multiply the input columns of the consumer's weight (out, in) by s
    (in,)."""
    return weight * s


def search(
    X: Tensor,
    X_max: Tensor,
    weights: Sequence[Tensor],
    quantize_activation: Quantizer,
    quantize_weight: Quantizer,
    alphas: Sequence[float] = ALPHAS,
) -> tuple[float | None, Tensor]:
    """Search SmoothQuant's alpha with the least output error of the quantized consumers on X.

    X, X_max: (tokens, in), the consumers' input, and (in,), max|X_j| over all tokens
    weights: W (out, in) of each consumer

    Returns (alpha, s), or (None, ones) where no alpha lowers the error.
    """
    exact = [X @ w.T for w in weights]
    W_max = torch.stack([w.abs().amax(0) for w in weights]).amax(0)

    def error(s: Tensor) -> float:
        x = quantize_activation(X / s)
        outputs = (x @ quantize_weight(fold_consumer(w, s)).T for w in weights)
        return sum(float((y - q).square().sum()) for y, q in zip(exact, outputs, strict=True))

    best: tuple[float | None, Tensor] = (None, torch.ones_like(W_max))
    least = error(best[1])
    for alpha in alphas:
        s = compute_factors(X_max, W_max, alpha)
        if (now := error(s)) < least:
            least, best = now, (alpha, s)
    return best
