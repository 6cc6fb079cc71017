"""Cross-layer equalization (Nagel et al. 2019, arXiv:1906.04721, section 4.1).

Channel i of a layer may be divided by s_i, and input i of the next layer multiplied by it, without
changing their function, where only f with f(s x) = s f(x) for s > 0 (ReLU) lies between them:

    r1_i = max |W1[i]|        r2_i = max |W2[:, i]|        s_i = sqrt(r1_i r2_i) / r2_i

Then both channels have the range sqrt(r1_i r2_i), so that one range for a tensor wastes less. In a
chain each layer is in two pairs: all are passed until no factor changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

PASSES = 100  # at most; Nagel et al. repeat until convergence
SETTLED = 1e-3  # relative change of a factor in a pass, below which it has converged


def find_factors(
    pairs: Sequence[tuple[str, Sequence[str]]],
    weights: Mapping[str, Tensor],
    groups: Mapping[str, int],
) -> dict[str, Tensor]:
    """Find cross-layer equalization's {first layer of a pair: s (channels,), float64}, by which its
    outputs are divided and the inputs of the layers behind it multiplied; 1 for a channel of zeros.

    pairs: (first layer, layers that read it)
    weights: {layer: (out, in / groups, ...)}
    groups: {layer: groups of its channels}
    """
    magnitudes = {name: weight.abs().double() for name, weight in weights.items()}
    factors = {first: torch.ones(len(weights[first]), dtype=torch.double) for first, _ in pairs}
    for _ in range(PASSES):
        change = 0.0
        for first, readers in pairs:
            r1 = magnitudes[first].flatten(1).amax(1)
            r2 = torch.stack([_input_ranges(magnitudes[r], groups[r]) for r in readers]).amax(0)
            s = torch.where((r1 > 0) & (r2 > 0), (r1 * r2).sqrt() / r2, 1.0)
            magnitudes[first] = divide_outputs(magnitudes[first], s)
            for reader in readers:
                magnitudes[reader] = multiply_inputs(magnitudes[reader], s, groups[reader])
            factors[first] = factors[first] * s
            change = max(change, float((s - 1).abs().max()))
        if change < SETTLED:
            break
    return factors


def divide_outputs(parameter: Tensor, s: Tensor) -> Tensor:
    """Equalize channels: divide a weight (out, in, ...) or bias (out,) by s (out,)."""
    return parameter / s.reshape(-1, *[1] * (parameter.ndim - 1))


def multiply_inputs(weight: Tensor, s: Tensor, groups: int) -> Tensor:
    """Equalize channels: multiply the inputs of a weight (out, in / groups, ...) by s (in,)."""
    by_group = weight.reshape(groups, -1, *weight.shape[1:])
    factor = s.reshape(groups, 1, weight.shape[1], *[1] * (weight.ndim - 2))
    return (by_group * factor).reshape(weight.shape)


def _input_ranges(magnitude: Tensor, groups: int) -> Tensor:
    """Return for equalization the largest magnitude (in,) of each input of a weight (out, in /
    groups, ...)."""
    by_group = magnitude.reshape(groups, -1, *magnitude.shape[1:]).amax(1)
    return by_group.reshape(groups * magnitude.shape[1], -1).amax(1)
