"""The compressed state as a torch model: what every lowering must reproduce.

A quantized linear multiplies de-quantized weights with inputs that were coded and decoded again:

    activations "tensor"   (clamp(round(x / s) + z, 0, 255) - z) * s     s, z of the module's Range
    activations "token"    round(x / s) * s, s = max|x| / 127 of each row (a row of zeros stays 0)
    activations None       x itself

A convolution does the same with the image that its filters are laid over, whose padding is 0; its
weight (out, in of a group, height, width) is quantized as (out, in * height * width). What a
residual add reads is quantized alike, where the state has its range, and what an attention
multiplies (model/checkpoint/attention_operands.py).

x is first multiplied, feature by feature, by its module's factor where the state has one; the codes
of the weight hold the inverse.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import cast

import torch
from torch import Tensor, nn

from optimizer.foundation.conv_geometry import ConvGeometry
from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.qtensor import QTensor
from optimizer.foundation.state import Activations, CompressedState, Range, input_name, owner_of
from optimizer.model.architectures.operands import attention_of, operands_of
from optimizer.model.checkpoint import attention_operands

AT_ONCE = 1 << 22  # values of a weight


def code_static(x: Tensor, covered: Range) -> Tensor:
    """x (..., features) rounded to the codes of one range, and back."""
    zero = covered.zero_point
    return ((x / covered.scale).round() + zero).clamp(0, 255).sub(zero) * covered.scale


def code_per_token(x: Tensor) -> Tensor:
    """x (..., features), each row rounded to the int8 codes of its own scale, and back."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / torch.where(scale > 0, scale, torch.ones_like(scale))).round() * scale


class QuantLinear(nn.Module):
    """y = code(x * factor) W^T + b. weight (out, in): de-quantized values, or codes, which are
    then de-quantized a few rows at a time whenever they are used.

    covered: the static range; needed exactly when activations is "tensor". factor: (in,) or None.
    """

    factor: Tensor | None

    def __init__(
        self,
        weight: Tensor | QTensor,
        bias: Tensor | None,
        activations: Activations,
        covered: Range | None,
        factor: Tensor | None = None,
    ) -> None:
        super().__init__()
        if (activations == "tensor") != (covered is not None):
            raise ValueError(f"range {covered} with activations {activations!r}")
        self.integers = weight if isinstance(weight, QTensor) else None
        values = torch.empty(0) if isinstance(weight, QTensor) else weight
        self.values = nn.Parameter(values, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.register_buffer("factor", factor, persistent=False)
        self.activations, self.covered = activations, covered
        shape = weight.integers.shape if isinstance(weight, QTensor) else weight.shape
        self.out_features, self.in_features = shape

    @classmethod
    def of(
        cls,
        module: nn.Module,
        weight: Tensor | QTensor,
        activations: Activations,
        covered: Range | None,
        factor: Tensor | None = None,
    ) -> QuantLinear:
        """What stands for `module`, a linear layer or a convolution, with its bias."""
        bias = cast(Tensor | None, module.bias)
        if not isinstance(module, nn.Conv2d):
            return QuantLinear(weight, bias, activations, covered, factor)
        assert factor is None
        return QuantConvolution(weight, module, activations, covered)

    @property
    def weight(self) -> Tensor:
        """(out, in): the values that are multiplied with, which some models ask a linear for."""
        return self.values if self.integers is None else self.integers.dequantize()

    def code(self, x: Tensor) -> Tensor:
        """The input as its codes say it is."""
        if self.factor is not None:
            x = x * self.factor
        if self.activations == "token":
            return code_per_token(x)
        return x if self.covered is None else code_static(x, self.covered)

    def within(self, x: Tensor) -> Tensor:
        """x, as given, with what lies beyond the codes moved to the nearest code."""
        if self.covered is None:
            return x
        scaled = x if self.factor is None else x * self.factor
        zero, scale = self.covered.zero_point, self.covered.scale
        inside = scaled.clamp(-zero * scale, (255 - zero) * scale)
        return torch.where(
            inside == scaled, x, inside if self.factor is None else inside / self.factor
        )

    def clipped(self, x: Tensor) -> int:
        """How many values of x lie beyond the codes by more than rounding."""
        if self.covered is None:
            return 0
        x = x if self.factor is None else x * self.factor
        codes = (x / self.covered.scale).round() + self.covered.zero_point
        return int(((codes < 0) | (codes > 255)).sum())

    def forward(self, x: Tensor) -> Tensor:
        x = self.code(x)
        if self.integers is None:
            return nn.functional.linear(x, self.values, self.bias)
        parts = []
        step = max(1, AT_ONCE // self.in_features)
        for rows in (slice(i, i + step) for i in range(0, self.out_features, step)):
            bias = None if self.bias is None else self.bias[rows]
            parts.append(nn.functional.linear(x, self.integers.dequantize(rows), bias))
        return torch.cat(parts, -1)


class QuantConvolution(QuantLinear):
    """y = code(x) * W + b, a convolution laid as that of `like`. weight (out, in of a group *
    height * width)."""

    def __init__(
        self,
        weight: Tensor | QTensor,
        like: nn.Conv2d,
        activations: Activations,
        covered: Range | None,
    ) -> None:
        super().__init__(weight, like.bias, activations, covered)
        self.geometry = ConvGeometry.of(like)

    def forward(self, x: Tensor) -> Tensor:
        return self.geometry.conv2d(self.code(x), self.weight, self.bias)


class QuantInput(nn.Module):
    """In the place of an identity: hands on what it reads as its codes say it is."""

    factor = None
    activations: Activations = "tensor"

    def __init__(self, covered: Range) -> None:
        super().__init__()
        self.covered = covered

    def forward(self, x: Tensor) -> Tensor:
        return code_static(x, self.covered)


def simulated(
    model: nn.Module,
    state: CompressedState,
    activations: bool = True,
    only: Collection[str] | None = None,
) -> nn.Module:
    """A copy of the float `model` that computes what `state` says; `model` is left as it was.

    Unchanged parameters are shared with `model`, not copied. activations: False leaves inputs in
    float (weight error alone). only: the modules to quantize (bisection); the others run in float
    with `replaced` values, so folded smoothing stays consistent.
    Raises CheckpointError when the state names a parameter that the model does not have.
    """
    twin = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    parameters = dict(twin.named_parameters(remove_duplicate=False))
    pruned = set(state.pruned_floats)
    unknown = sorted({*state.weights, *state.replaced} - parameters.keys())
    if unknown:
        raise CheckpointError(
            f"the state holds {', '.join(unknown[:3])}, which the model does not have",
            where="compressed state",
            fix="Use the checkpoint and the task that this state was made from.",
        )
    for name, value in state.replaced.items():
        if only is not None and name in pruned and owner_of(name) not in only:
            continue
        set_parameter(twin, name, value)
        parameters[name] = twin.get_parameter(name)
    for name in state.weights:
        module = name.removesuffix(".weight")
        if only is not None and module not in only:
            continue
        if isinstance(twin.get_submodule(module), nn.Embedding):
            set_parameter(twin, name, state.weights[name].dequantize())
            continue
        mode = state.activations_of(module) if activations else None
        covered = state.ranges[input_name(module)] if mode == "tensor" else None
        factor = state.factor_of(module)
        values = state.weights[name].dequantize()
        filled = QuantLinear.of(twin.get_submodule(module), values, mode, covered, factor)
        set_module(twin, module, filled)
    if activations:
        attentions = [attention_of(name) for name in operands_of(state)]
        if attentions:
            attention_operands.install(twin, attentions)
        for module, range_ in state.summands.items():
            if only is None or module in only:
                set_module(twin, module, QuantInput(range_))
    return twin


def set_parameter(model: nn.Module, name: str, value: Tensor) -> None:
    """Give the parameter `name` a new tensor."""
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, nn.Parameter(value, requires_grad=False))


def set_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` where `name` says."""
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, module)
