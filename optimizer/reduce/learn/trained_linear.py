"""A quantized linear whose weight, scales, range and bias are trainable parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from optimizer.compress.methods.weights import straight_through as ste
from optimizer.compress.simulate import set_module, set_parameter
from optimizer.foundation.process.torch_device import CPU
from optimizer.foundation.qtensor import QTensor
from optimizer.foundation.state import (
    Activations,
    CompressedState,
    Range,
    input_name,
    owner_of,
    weight_name,
)
from optimizer.model.checkpoint.model import copy_module


class TrainedLinear(nn.Module):
    """Linear layer that qat trains, y = quantize(x * factor) W^T + b, whose weight, scales, input
    range and bias are trained. It computes the same bits as simulate.QuantLinear does from
    `quantized` and `covered`.

    The weight starts at the values of its integers, half a step from any other integer. The
    integers of gptq and similar methods are often not the nearest to the float weight; from the
    float weight, the first few steps would change thousands of them at once (docs/decisions/0033).

    kept: mask of the integers that may differ from the zero point; None: all may
    covered: range of the input; None unless activations is "tensor"
    """

    factor: Tensor | None
    kept: Tensor | None

    def __init__(
        self,
        bias: Tensor | None,
        start: QTensor,
        activations: Activations,
        covered: Range | None,
        factor: Tensor | None = None,
        kept: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.start, self.start_range, self.activations = start, covered, activations
        self.latent = nn.Parameter(start.dequantize())
        self.log_scale = nn.Parameter(torch.zeros_like(start.scale))
        self.log_range = (
            None
            if covered is None
            else nn.Parameter(ste.start_logarithms(covered).to(start.scale.device))
        )
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())
        self.register_buffer("factor", factor, persistent=False)
        self.register_buffer("kept", kept, persistent=False)
        self.out_features, self.in_features = start.integers.shape

    @property
    def quantized(self) -> QTensor:
        """Current weight as integers and scales, as qat trained it so far."""
        return ste.quantize_weight(self._latent, self._scale, self.start)

    @property
    def covered(self) -> Range | None:
        """Activation range of the input as qat trained it so far; None where no static range is
        used."""
        if self.start_range is None or self.log_range is None:
            return None
        return ste.scale_range(self.start_range, self.log_range)

    @property
    def weight(self) -> Tensor:
        """Values of the quantized weight (out, in) that qat trains."""
        return ste.fake_quantize_weight(self._latent, self._scale, self.start)

    @property
    def _scale(self) -> Tensor:
        return ste.scale_of(self.start.scale, self.log_scale)

    @property
    def _latent(self) -> Tensor:
        return self.latent if self.kept is None else self.latent * self.kept

    def quantize(self, x: Tensor) -> Tensor:
        """Multiply x by the factor and fake-quantize it, with gradients for qat; without
        quantization where activations is None."""
        if self.factor is not None:
            x = x * self.factor
        if self.activations == "token":
            return ste.fake_quantize_tokens(x)
        if self.start_range is None or self.log_range is None:
            return x
        return ste.fake_quantize_activation(x, self.start_range, self.log_range)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.quantize(x), self.weight, self.bias)


@dataclass(frozen=True)
class Trained:
    """A model that computes as a compressed state and that qat trains.

    linears: quantized linears by module name
    parameters: trained parameters by name
    start: state before training
    """

    model: nn.Module
    linears: Mapping[str, TrainedLinear]
    parameters: Mapping[str, nn.Parameter]
    start: CompressedState

    @property
    def step(self) -> tuple[float, int]:
        """Return (median of all weight scales, highest integer of the scheme that most weights
        have), by which qat scales its steps."""
        scales = torch.cat([li.start.scale.abs().flatten() for li in self.linears.values()])
        sizes: Counter[int] = Counter()
        for linear in self.linears.values():
            sizes[linear.start.scheme.high] += linear.latent.numel()
        return float(scales.median()), sizes.most_common(1)[0][0]

    @property
    def state(self) -> CompressedState:
        """Return the compressed state as qat trained it so far, on the CPU, without replaced float
        parameters: their trained values are in `values`."""
        weights = {weight_name(m): linear.quantized for m, linear in self.linears.items()}
        ranges = {input_name(m): r for m, linear in self.linears.items() if (r := linear.covered)}
        return CompressedState(
            weights={**self.start.weights, **weights},
            ranges=ranges,
            factors=self.start.factors,
            activations=self.start.activations,
            sparsity=self.start.sparsity,
            notes=self.start.notes,
        ).to(CPU)

    @property
    def values(self) -> dict[str, Tensor]:
        """Return {parameter of the checkpoint: value that qat trained, on the CPU}. For a quantized
        weight these are the values of its integers, with the factor of its input folded back."""
        values = {}
        for module, linear in self.linears.items():
            weight = linear.quantized.dequantize()
            factor = self.start.factor_of(module)
            values[weight_name(module)] = weight if factor is None else weight * factor
            if linear.bias is not None:
                values[f"{module}.bias"] = linear.bias.detach()
        inside = tuple(f"{module}." for module in self.linears)
        for name, p in self.parameters.items():
            if not name.startswith(inside):
                values[name] = p.detach()
        return {name: t.cpu() for name, t in {**self.start.replaced, **values}.items()}


def make_trainable(model: nn.Module, state: CompressedState, untouched: Collection[str]) -> Trained:
    """Return a copy of the float `model` that computes as `state` and that qat can train; `model`
    stays as it is. Modules that read one tensor share one range, so that a runtime quantizes the
    tensor once.

    state: compressed state to start from
    untouched: names of parameters that are not trained
    """
    twin = copy_module(model)
    for name, value in state.replaced.items():
        set_parameter(twin, name, value)
    floats = dict(twin.named_parameters(remove_duplicate=False))
    linears = {}
    for name, q in state.weights.items():
        module = owner_of(name)
        if isinstance(twin.get_submodule(module), nn.Embedding):
            set_parameter(twin, name, q.dequantize())
            continue
        factor = state.factor_of(module)
        mode = state.activations_of(module)
        kept = _kept(q) if name in state.sparsity else None
        linears[module] = TrainedLinear(
            floats.get(f"{module}.bias"),
            q,
            mode,
            state.ranges[input_name(module)] if mode == "tensor" else None,
            factor,
            kept,
        )
        linears[module].log_range = _shared_range(linears, module, state)
        set_module(twin, module, linears[module])
    parameters = {n: p for n, p in twin.named_parameters() if n not in untouched}
    inside = tuple(f"{m}." for m in linears)
    for name, p in parameters.items():
        if not name.startswith(inside):
            set_parameter(twin, name, p.detach().clone())  # `model` shares it
    parameters = {n: p for n, p in twin.named_parameters() if n not in untouched}
    return Trained(twin, linears, parameters, state)


def _kept(q: QTensor) -> Tensor:
    """Return a mask (out, in) of the integers that differ from the zero point, which qat keeps."""
    if q.zero_point is None:
        return q.integers != 0
    out, groups = q.scale.shape
    integers = q.integers.reshape(out, groups, -1)
    return (integers != q.zero_point[..., None]).reshape(q.integers.shape)


def _shared_range(
    linears: Mapping[str, TrainedLinear], module: str, state: CompressedState
) -> nn.Parameter | None:
    """Return the range parameters that qat trains of the first module in the block that reads the
    same tensor as `module`, which may be `module` itself; None without a static range. Modules with
    equal range and factor are taken to read the same tensor."""
    linear, block = linears[module], module.rpartition(".")[0].rpartition(".")[0]
    for name, reader in linears.items():
        alike = name.startswith(f"{block}.") and reader.start_range == linear.start_range
        if alike and _equal(state.factor_of(name), state.factor_of(module)):
            return reader.log_range
    return linear.log_range


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))
