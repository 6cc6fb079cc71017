"""SmoothQuant (Xiao et al. 2022, arXiv 2211.10438): move outliers from activations to weights.

A few channels of an activation are often far larger than the rest and set the step for all. The
producer's output channel j is divided by s[j] and the consumers' input column j multiplied by it:

    y = x W^T = (x / s) (W s)^T            s[j] = max|x[:, j]| ** a / max|W[:, j]| ** (1 - a)

so the function is unchanged (law: up to float rounding) and only the quantization error moves.
Strength a = 0.5 shares the difficulty, 1 gives all of it to the weights; `search` measures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

STRENGTHS = tuple(i / 10 for i in range(11))
SMALLEST = 1e-5  # of a channel: below it the channel carries nothing and is left alone

Code = Callable[[Tensor], Tensor]  # a tensor -> what its codes say it is


def factors(activation_absmax: Tensor, weight_absmax: Tensor, strength: float) -> Tensor:
    """s (features,), positive and finite, scaled to a geometric mean of 1.

    Both arguments (features,). A channel that is empty on either side gets 1 before scaling. The
    common factor changes nothing in a per-tensor or per-channel code, and keeps the folded
    numbers in the float formats' comfortable range.
    """
    usable = (activation_absmax > SMALLEST) & (weight_absmax > SMALLEST)
    x = torch.where(usable, activation_absmax, torch.ones_like(activation_absmax)).double()
    w = torch.where(usable, weight_absmax, torch.ones_like(weight_absmax)).double()
    logs = strength * x.log() - (1 - strength) * w.log()
    logs = torch.where(usable, logs - logs[usable].mean(), torch.zeros_like(logs))
    return logs.exp().float()


def fold_producer(parameter: Tensor, s: Tensor, rows: slice = slice(None)) -> Tensor:
    """The producer's weight (out, in) or (out,), or its bias (out,), with `rows` divided by s."""
    folded = parameter.clone()
    folded[rows] = parameter[rows] / (s[:, None] if parameter.ndim == 2 else s)
    return folded


def fold_consumer(weight: Tensor, s: Tensor) -> Tensor:
    """The consumer's weight (out, in) with its input columns multiplied by s (in,)."""
    return weight * s


def search(
    rows: Tensor,
    activation_absmax: Tensor,
    weights: Sequence[Tensor],
    code_activation: Code,
    code_weight: Code,
    strengths: Sequence[float] = STRENGTHS,
) -> tuple[float | None, Tensor]:
    """The strength whose quantized consumers come closest to the float ones on `rows`.

    rows (tokens, in) of the consumers' input; weights: the consumers', (out, in) each;
    code_activation and code_weight simulate quantization. Returns (strength, s), or (None, ones)
    when not smoothing is at least as good as every strength.
    """
    exact = [rows @ w.T for w in weights]
    weight_absmax = torch.stack([w.abs().amax(0) for w in weights]).amax(0)

    def error(s: Tensor) -> float:
        x = code_activation(rows / s)
        outputs = (x @ code_weight(fold_consumer(w, s)).T for w in weights)
        return sum(float((y - q).square().sum()) for y, q in zip(exact, outputs, strict=True))

    best: tuple[float | None, Tensor] = (None, torch.ones_like(weight_absmax))
    least = error(best[1])
    for strength in strengths:
        s = factors(activation_absmax, weight_absmax, strength)
        if (now := error(s)) < least:
            least, best = now, (strength, s)
    return best
