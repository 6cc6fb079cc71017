"""The compressed state as a torch model, which every lowering must reproduce.

A quantized linear multiplies de-quantized weights with fake-quantized inputs:

    activations "tensor"   (clamp(round(x / s) + z, 0, 255) - z) * s     s, z of the module's Range
    activations "token"    round(x / s) * s, s = max|x| / 127 of each row (a row of zeros stays 0)
    activations "float8 tensor"  E4M3(x / s) * s, s of the module's Range
    activations "float8 token"   E4M3(x / s) * s, s = max|x| / 448 of each row
    activations "float8 group"   the same, s of each 128 values of a row
    activations "float4 group"   E2M1(x / s) * s, s = E4M3(g max|x| / 6) / g of each 16 values of a
                                 row, g of the module's Range (rounding/float4.py)
    activations None       x itself

A convolution does the same with its image, padded with 0; its weight (out, in of a group, height,
width) is quantized as (out, in * height * width). Inputs of residual adds and of products of
attention (model/checkpoint/attention_operands.py) are quantized alike where the state has their
range, and what a KV cache holds (model/checkpoint/cache_operands.py) as "float8 tensor".

x is first multiplied, feature by feature, by its module's factor where the state has one; the
weight's integers hold the inverse.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import cast

import torch
from torch import Tensor, nn

from optimizer.foundation.conv_geometry import ConvGeometry
from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.qtensor import BLOCK, QTensor
from optimizer.foundation.rounding import float4, float8
from optimizer.foundation.state import (
    PER_TOKEN,
    STATIC,
    Activations,
    CompressedState,
    Range,
    input_name,
    owner_of,
)
from optimizer.model.architectures.operands import find_cache
from optimizer.model.checkpoint.cache_operands import install_operands
from optimizer.model.checkpoint.model import copy_module

AT_ONCE = 1 << 22  # values of a weight that are de-quantized together


def fake_quantize(x: Tensor, covered: Range, mode: Activations = "tensor") -> Tensor:
    """Quantize and de-quantize x (..., features) in torch by one range, in a mode of STATIC."""
    if mode == "float8 tensor":
        return float8.nearest(x / covered.float8_scale).to(x.dtype) * covered.float8_scale
    if mode == "float4 group":
        return float4.quantize_inputs(x, covered.float4_global_scale)
    zero = covered.zero_point
    return ((x / covered.scale).round() + zero).clamp(0, 255).sub(zero) * covered.scale


def find_largest_values(x: Tensor, mode: Activations) -> Tensor:
    """Compute the largest magnitude of the values of x (..., features) that share a scale.

    mode: one of PER_TOKEN

    Returns (..., 1) where a token has one scale; (..., features) where each group of its features
    has one, repeated for every feature of the group.
    """
    if mode != "float8 group":
        return x.abs().amax(-1, keepdim=True)
    largest: Tensor = x.unflatten(-1, (-1, BLOCK)).abs().amax(-1)
    return largest.repeat_interleave(BLOCK, -1)


def fake_quantize_per_token(x: Tensor) -> Tensor:
    """Quantize and de-quantize each row of x (..., features) in torch, to int8 by its largest
    value."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x / torch.where(scale > 0, scale, torch.ones_like(scale))).round() * scale


def fake_quantize_by_largest_float8(x: Tensor, largest: Tensor) -> Tensor:
    """Quantize and de-quantize x (..., features) to E4M3, with `largest` as 448."""
    scale = largest / float8.LARGEST
    scaled = x / torch.where(scale > 0, scale, torch.ones_like(scale))
    return float8.nearest(scaled).to(x.dtype) * scale


def quantize_tokens(x: Tensor, mode: Activations) -> Tensor:
    """Quantize and de-quantize each row of x (..., features) in a mode of PER_TOKEN."""
    if mode == "token":
        return fake_quantize_per_token(x)
    return fake_quantize_by_largest_float8(x, find_largest_values(x, mode))


class QuantLinear(nn.Module):
    """Torch module of a quantized linear layer, in the simulation of the compressed state: y =
    fake_quantize(x * factor) W^T + b.

    weight: (out, in), de-quantized values, or integers that are de-quantized some rows at a time
        in every forward pass
    covered: static range, given exactly with activations in STATIC
    factor: (in,) or None
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
        if (activations in STATIC) != (covered is not None):
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
        """The quantized torch module for a linear layer or a convolution, with its bias."""
        bias = cast(Tensor | None, module.bias)
        if not isinstance(module, nn.Conv2d):
            return QuantLinear(weight, bias, activations, covered, factor)
        assert factor is None
        return QuantConvolution(weight, module, activations, covered)

    @property
    def weight(self) -> Tensor:
        """De-quantized weight (out, in) of the quantized layer, which some models read from a
        linear."""
        return self.values if self.integers is None else self.integers.dequantize()

    def quantize_input(self, x: Tensor) -> Tensor:
        """x times the factor, fake-quantized as the compressed state says; not quantized where
        activations is None."""
        if self.factor is not None:
            x = x * self.factor
        if self.activations in PER_TOKEN:
            return quantize_tokens(x, self.activations)
        return x if self.covered is None else fake_quantize(x, self.covered, self.activations)

    @property
    def ends(self) -> tuple[float, float]:
        """Values that the least and largest integer of the quantized layer's static range stand
        for."""
        assert self.covered is not None
        if self.activations == "float8 tensor":
            end = float8.LARGEST * self.covered.float8_scale
            return -end, end
        if self.activations == "float4 group":
            end = float4.LARGEST * float8.LARGEST / self.covered.float4_global_scale
            return -end, end
        zero, scale = self.covered.zero_point, self.covered.scale
        return -zero * scale, (255 - zero) * scale

    def within(self, x: Tensor) -> Tensor:
        """x clamped to the range that the quantized layer's integers cover; x itself without a
        static range."""
        if self.covered is None:
            return x
        scaled = x if self.factor is None else x * self.factor
        inside = scaled.clamp(*self.ends)
        return torch.where(
            inside == scaled, x, inside if self.factor is None else inside / self.factor
        )

    def clipped(self, x: Tensor) -> int:
        """Number of values of the quantized layer's input x outside the static range by more than
        rounding."""
        if self.covered is None:
            return 0
        x = x if self.factor is None else x * self.factor
        if self.activations in ("float8 tensor", "float4 group"):  # half a step of 32 beyond 448
            return int((x.abs() > self.ends[1] * (1 + 16 / float8.LARGEST)).sum())
        integers = (x / self.covered.scale).round() + self.covered.zero_point
        return int(((integers < 0) | (integers > 255)).sum())

    def forward(self, x: Tensor) -> Tensor:
        x = self.quantize_input(x)
        if self.integers is None:
            return nn.functional.linear(x, self.values, self.bias)
        parts = []
        step = max(1, AT_ONCE // self.in_features)
        for rows in (slice(i, i + step) for i in range(0, self.out_features, step)):
            bias = None if self.bias is None else self.bias[rows]
            parts.append(nn.functional.linear(x, self.integers.dequantize(rows), bias))
        return torch.cat(parts, -1)


class QuantConvolution(QuantLinear):
    """Torch module of a quantized convolution, in the simulation of the compressed state: y =
    fake_quantize(x) * W + b, with the geometry of `like`.

    weight: (out, in of a group * height * width)
    """

    def __init__(
        self,
        weight: Tensor | QTensor,
        like: nn.Conv2d,
        activations: Activations,
        covered: Range | None,
    ) -> None:
        super().__init__(weight, like.bias, activations, covered)
        self.geometry = ConvGeometry.read(like)

    def forward(self, x: Tensor) -> Tensor:
        return self.geometry.conv2d(self.quantize_input(x), self.weight, self.bias)


class QuantInput(nn.Module):
    """Torch module that fake-quantizes its input by one range, in the simulation of the compressed
    state; it replaces an identity in the model."""

    factor = None

    def __init__(self, covered: Range, activations: Activations = "tensor") -> None:
        super().__init__()
        self.covered, self.activations = covered, activations

    def forward(self, x: Tensor) -> Tensor:
        return fake_quantize(x, self.covered, self.activations)


def simulate_state(
    model: nn.Module,
    state: CompressedState,
    activations: bool = True,
    only: Collection[str] | None = None,
    place: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> nn.Module:
    """Return a copy of the float `model` with the state applied; it shares unchanged parameters.

    activations: False: inputs stay float, for the weight error alone
    only: modules to quantize (bisection); the others run in float with `replaced` values, so that
        folded smoothing stays consistent
    place: function that moves a value to where it stays, such as a mapped file

    Raises CheckpointError when the state names a parameter that the model does not have.
    """
    twin = copy_module(model)
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
        set_parameter(twin, name, place(value))
        parameters[name] = twin.get_parameter(name)
    for name in state.weights:
        module = name.removesuffix(".weight")
        if only is not None and module not in only:
            continue
        if isinstance(twin.get_submodule(module), nn.Embedding):
            set_parameter(twin, name, place(state.weights[name].dequantize()))
            continue
        mode = state.activations_of(module) if activations else None
        covered = state.ranges[input_name(module)] if mode in STATIC else None
        factor = state.factor_of(module)
        values = place(state.weights[name].dequantize())
        filled = QuantLinear.of(twin.get_submodule(module), values, mode, covered, factor)
        set_module(twin, module, filled)
    if activations:
        install_operands(twin, state.summands)
        for module, range_ in state.summands.items():
            if only is None or module in only:
                set_module(twin, module, replace_identity(module, range_))
    return twin


def replace_identity(name: str, covered: Range) -> QuantInput:
    """Make the torch module that replaces the identity `name` when the compressed state is
    simulated, and fake-quantizes what passes through."""
    return QuantInput(covered, "float8 tensor" if find_cache(name) else "tensor")


def set_parameter(model: nn.Module, name: str, value: Tensor) -> None:
    """Replace the parameter `name` of the torch model in which compress simulates its state by a
    tensor."""
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, nn.Parameter(value, requires_grad=False))


def set_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the module `name` of the torch model in which compress simulates its state."""
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, module)
