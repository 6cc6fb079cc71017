"""Laws of norms that were folded into convolutions, proven by transformers' own modules.

A norm in eval mode is x -> factor x + shift, channel by channel, and answers 0 and 1 with shift and
factor + shift. Convolutions that were folded hold W factor and b factor + shift, rounded once.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from optimizer.model.architectures.residual_blocks import BatchNorms
from optimizer.model.checkpoint.batch_norms import normed
from optimizer.validate.ledger.pieces.roundoff import UNIT

DOUBLE = 2.0**-53  # roundoff of what is computed here, a few times


def folded(theirs: nn.Module, ours: Mapping[str, Tensor], norms: BatchNorms) -> list[str]:
    """What is wrong with parameters of convolutions that a norm of `theirs` follows. ours: all
    parameters, by name."""
    problems = []
    for path, _, pair, convolution, norm in normed(theirs, norms):
        shift, factor, rounding = _affine(norm)
        weight = convolution.weight.detach().double()
        before = torch.zeros_like(shift)
        if convolution.bias is not None:
            before = convolution.bias.detach().double()
        rows = (-1, *(1 for _ in weight.shape[1:]))
        expected = {
            "weight": (weight * factor.reshape(rows), weight.abs() * rounding.reshape(rows)),
            "bias": (before * factor + shift, (before.abs() + 1) * rounding),
        }
        for part, (value, slack) in expected.items():
            name = f"{path}.{pair.convolution}.{part}"
            error = (ours[name].detach().double() - value).abs()
            if not bool((error <= UNIT["fp32"] * value.abs() + slack).all()):
                problems.append(f"{name}: is not what its norm folded into it gives")
    return problems


def _affine(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor, Tensor]:
    """(shift, factor, how far either may be off), each (channels,) float64."""
    places = torch.tensor([0.0, 1.0], dtype=torch.float64).reshape(2, 1, 1, 1)
    with torch.no_grad():
        at_0, at_1 = copy.deepcopy(norm).double().eval()(places.expand(2, norm.num_features, 1, 1))
    shift, one = at_0[:, 0, 0], at_1[:, 0, 0]
    mean = norm.running_mean
    assert mean is not None
    factor = one - shift
    terms = one.abs() + shift.abs() + (mean.double() * factor).abs()
    return shift, factor, 8 * DOUBLE * terms
