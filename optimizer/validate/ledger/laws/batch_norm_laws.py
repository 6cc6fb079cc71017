"""Check batch norms that were folded into convolutions, with transformers' own modules.

compared   each folded weight and bias with W factor and b factor + shift. A norm in eval mode is x
           -> factor x + shift per channel, so its answers to 0 and 1 give both
limit      derived: one float32 rounding of the result, and the float64 rounding of this
           computation
caught     another epsilon, one wrong channel: test_another_epsilon_is_named,
           test_one_channel_is_named
caller     hop load
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from optimizer.model.architectures.residual_blocks import BatchNorms
from optimizer.model.checkpoint.batch_norms import find_pairs
from optimizer.validate.ledger.pieces.roundoff import UNIT

DOUBLE = 2.0**-53  # unit roundoff of this computation


def compare_folded(
    model: nn.Module, parameters: Mapping[str, Tensor], norms: BatchNorms
) -> list[str]:
    """Return a problem for each convolution into which a batch norm was folded, where the folded
    weight or bias does not compute the convolution followed by its norm.

    model: transformers' own model, with batch norms
    parameters: parameters of this project's model, by name
    norms: the folded batch norms
    """
    problems = []
    for path, _, pair, convolution, norm in find_pairs(model, norms):
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
            error = (parameters[name].detach().double() - value).abs()
            if not bool((error <= UNIT["fp32"] * value.abs() + slack).all()):
                problems.append(f"{name}: differs from the value with its norm folded in")
    return problems


def _affine(norm: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Return (shift, factor, bound of the error of either) that the law expects of a folded norm,
    each (channels,) float64."""
    places = torch.tensor([0.0, 1.0], dtype=torch.float64).reshape(2, 1, 1, 1)
    mean = norm.get_buffer("running_mean")
    with torch.no_grad():
        at_0, at_1 = copy.deepcopy(norm).double().eval()(places.expand(2, len(mean), 1, 1))
    shift, one = at_0[:, 0, 0], at_1[:, 0, 0]
    factor = one - shift
    terms = one.abs() + shift.abs() + (mean.double() * factor).abs()
    return shift, factor, 8 * DOUBLE * terms
