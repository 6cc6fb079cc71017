"""The quadratic that GPTQ and SparseGPT minimise, from sums over the calibration tokens.

For a linear layer y = x W^T whose float input is x_f, and whose input is x_q once everything before
it is quantized, the output error of a quantized weight Q is, up to a constant,

    |x_f W^T - x_q Q^T|^2 = tr (Q - T) H (Q - T)^T   H = x_q^T x_q                  T = W + P^T H^-1
                                                     P = x_q^T (x_f - x_q) W^T     (T = W without P)

All that is needed of the data is the Hessian H (in, in) and, to correct the error made by earlier
blocks too (GPTAQ, arXiv 2504.02692; Qronos, arXiv 2505.11695), P (in, out). Both may be sums or
means over tokens, as long as they are the same.

Two factors weight the tokens in both sums:

- In most language models a few tokens have activations hundreds of times as long as the others'
  (Sun et al. 2024, "Massive activations", arXiv 2402.17762). Unlimited, they would decide the least
  squares alone. `token_weights` limits the length of each row.
- The first token of a text, on which much of attention rests (Xiao et al. 2024, "attention sinks",
  arXiv 2309.17453), is one of hundreds. Error feedback moves other errors into its direction, where
  a mean over tokens does not show them (docs/decisions/0021).
  `first_token_weights` raises its share (as RSQ, Sung et al. 2025, arXiv 2503.01820).
"""

from __future__ import annotations

import torch
from torch import Tensor

from optimizer.compress.methods.weights.factorization import PART, Factorization


def weigh_tokens(rows: Tensor, token_limit: float) -> Tensor:
    """Compute weights of calibration tokens in the Hessian, factors (tokens, 1), at most 1, after
    which no row is longer than token_limit medians.

    rows: (tokens, in); a row of zeros stays
    token_limit: longest row, in median lengths
    """
    length = rows.norm(dim=1, keepdim=True)
    limit = token_limit * length.median()
    return torch.where(length > limit, limit / length, torch.ones_like(length))


def weigh_first_tokens(real: Tensor, first_token: float) -> Tensor:
    """Compute weights of calibration tokens in the Hessian, factors (tokens, 1), at least 1, of the
    rows of inputs. With them each text's first token makes up the share `first_token` of the text's
    part of H.

    real: (texts, sequence) bool, the tokens that are not padding; their rows come text by text
    first_token: share of the first token, in squares, all tokens being equally long
    """
    tokens = real.sum(1)
    weight = (first_token / (1 - first_token) * (tokens - 1)).clamp(min=1).sqrt()
    factors = torch.ones(int(tokens.sum()), 1)
    some = tokens > 0
    factors[(tokens.cumsum(0) - tokens)[some]] = weight[some, None]
    return factors


def order_inputs(diagonal: Tensor, size: int, act_order: bool) -> Tensor:
    """The order (in,) in which inputs are quantized; with act_order large diagonals of H first.

    Groups of `size` neighbours are ordered by their mean and stay together; inputs are ordered
    within their group.
    """
    index = torch.arange(len(diagonal), device=diagonal.device).reshape(-1, size)
    if not act_order:
        return index.reshape(-1)
    groups = diagonal.reshape(-1, size)
    within = groups.argsort(dim=1, descending=True, stable=True)
    by_mean = groups.mean(1).argsort(descending=True, stable=True)
    return index.gather(1, within)[by_mean].reshape(-1)


def aim_at_float(W: Tensor, factor: Factorization, order: Tensor, P: Tensor | None) -> Tensor:
    """T^T (in, out), in the order of quantization: the values that Q should come close to.

    W: (out, in)
    factor: factorization of H in `order`; damping pulls T towards W, and an input that was always
        0 keeps W
    P: (in, out), overwritten; None where the inputs are the float model's, so that T is W

    Raises ValueError for a P that holds NaN or infinity.
    """
    if P is None:
        return W.T[order]
    for columns in P.split(PART, 1):
        if not bool(torch.isfinite(columns).all()):
            raise ValueError("P: holds NaN or infinity")
        columns.copy_(columns[order])
    factor.solve(P)
    for columns, rows in zip(P.split(PART, 1), W.split(PART), strict=True):
        columns.add_(rows.T[order])
    return P
