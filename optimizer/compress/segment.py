"""Compress the blocks of one segment, whose float weights are in memory, and move the stream on.

In order: fold smoothing, choose ranges, prune and round the weights, tune them, correct biases, and
run the stream through the compressed blocks while measuring. Every choice for a block is made on
the outputs of the compressed blocks before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from optimizer.compress import convolutions
from optimizer.compress.apply.activations.activation_ranges import (
    choose_cache_ranges,
    choose_ranges,
)
from optimizer.compress.apply.activations.folding import Folded
from optimizer.compress.apply.weights import bias_correction, rounding
from optimizer.compress.apply.weights.rounding import QuantizedInputs, RoundedWeights
from optimizer.compress.methods.weights.rtn import measure_relative_error
from optimizer.compress.module_rows import ModuleRow, join_remarks, label, round_significant
from optimizer.compress.simulate import (
    QuantConvolution,
    QuantLinear,
    replace_identity,
    set_parameter,
)
from optimizer.compress.walk import blocks as walk
from optimizer.compress.walk.blocks import BlockGroup
from optimizer.foundation.process import threads
from optimizer.foundation.process.torch_device import CPU
from optimizer.foundation.qtensor import QTensor, Scheme
from optimizer.foundation.references import resolve
from optimizer.foundation.state import CompressedState, Range, input_name, weight_name
from optimizer.recipe.compression.quantize import Quantize
from optimizer.recipe.compression.sparsity import Sparsity

MEASURED = 2048  # tokens over which a module's output error and saturation are measured: the
# first ones of the first partial sum


def compress(
    group: BlockGroup, quantize: Quantize, scratch: Path
) -> tuple[CompressedState, list[ModuleRow], dict[str, Tensor]]:
    """Compress a segment; returns its state, report rows, and {bias: correction}, all on the CPU.

    Smoothing changes the blocks' float weights.

    scratch: folder for activations that do not fit into memory

    Raises CheckpointError naming a weight or input that holds NaN.
    """
    activations = quantize.activations
    mode = activations.mode if activations else None
    folded, covered = Folded(), dict[str, Range]()
    if group.schemes:
        for method in quantize.of_kind("smoothing"):
            folded.add(resolve(method.apply)(group, quantize))
        if activations is not None and quantize.static_activations:
            covered = choose_ranges(group, activations, folded.factors)
    covered |= choose_cache_ranges(group)
    inputs = QuantizedInputs(mode, covered, folded.factors)
    chosen = rounding.compress_weights(group, inputs, quantize, scratch)
    replaced, notes = folded.replaced, folded.notes
    for method in quantize.of_kind("block-tuning") if group.schemes else ():
        tuned, remark = resolve(method.apply)(group, chosen.weights, inputs, quantize)
        chosen.tune(tuned, remark)
        for name, value in tuned.norm_weights.items():
            set_parameter(group.model, name, value)
        replaced = {**replaced, **tuned.norm_weights}
    weights = {weight_name(name): q for name, q in chosen.weights.items()}
    replaced = {**replaced, **{weight_name(name): w for name, w in chosen.floats.items()}}
    quantized, rows = _quantized_modules(group, inputs, chosen, folded)
    corrections: dict[str, Tensor] = {}
    if quantize.bias_correction:
        biases, corrections, why = bias_correction.correct(group, quantized)
        replaced, notes = {**replaced, **biases}, [*notes, *why]
    replaced = {**replaced, **_integer_biases(inputs, chosen, quantized)}
    measured = _measure(group, quantized, covered)
    rows = {n: replace(row, **measured[n].report()) for n, row in rows.items()}
    state = CompressedState(
        weights,
        replaced,
        ranges={input_name(n): r for n, r in covered.items()},
        factors={input_name(n): f for n, f in folded.factors.items()},
        activations=mode,
        sparsity={weight_name(n): str(s.shape) for n, s in group.sparsity.items()},
        notes=tuple(notes),
    )
    shifts = {name: shift.cpu() for name, shift in corrections.items()}
    return state.to(CPU), list(rows.values()), shifts


def compress_uncalibrated(
    schemes: Mapping[str, Scheme],
    sparsity: Mapping[str, Sparsity],
    tensors: Mapping[str, Tensor],
    quantize: Quantize,
    device: torch.device = CPU,
) -> tuple[CompressedState, list[ModuleRow]]:
    """Prune and round every weight without calibration or measurements, one per thread in memory
    at a time, on a GPU one at a time; returns (state, report rows)."""
    mode = quantize.activations.mode if quantize.activations else None

    def one(name: str) -> tuple[RoundedWeights, ModuleRow]:
        part, scheme = RoundedWeights(), schemes.get(name)
        values = tensors[weight_name(name)].to(device)
        rounding.compress_alone(part, (name, values), scheme, sparsity.get(name), quantize)
        error = round_significant(measure_relative_error(values, _values(part.all[name])))
        words = label(scheme, mode, sparsity.get(name))
        return part, ModuleRow(name, words, weight_error=error, note=part.remarks[name])

    whole, rows = RoundedWeights(), []
    names = dict.fromkeys([*schemes, *sparsity])
    for part, row in threads.map_in_threads(one, names) if device == CPU else map(one, names):
        whole.update(part.on_cpu())
        rows.append(row)
    state = CompressedState(
        {weight_name(name): q for name, q in whole.weights.items()},
        {weight_name(name): w for name, w in whole.floats.items()},
        activations=mode,
        sparsity={weight_name(n): str(s.shape) for n, s in sparsity.items()},
    )
    return state, rows


def _values(q: QTensor | Tensor) -> Tensor:
    return q if isinstance(q, Tensor) else q.dequantize()


def _integer_biases(
    inputs: QuantizedInputs, chosen: RoundedWeights, quantized: Mapping[str, QuantLinear]
) -> dict[str, Tensor]:
    """Round the biases of quantized convolutions to integer steps; returns {bias: new value}."""
    biases: dict[str, Tensor] = {}
    for name, module in quantized.items():
        if isinstance(module, QuantConvolution) and module.bias is not None:
            scale = chosen.weights[name].scale
            value = convolutions.round_bias(module.bias, inputs.ranges[name], scale)
            biases[f"{name}.bias"] = value
            module.bias = nn.Parameter(value, requires_grad=False)
    return biases


def _quantized_modules(
    group: BlockGroup, inputs: QuantizedInputs, chosen: RoundedWeights, folded: Folded
) -> tuple[dict[str, QuantLinear], dict[str, ModuleRow]]:
    """Return {module: its quantized replacement}, and {module: report row without measurements}."""
    quantized: dict[str, QuantLinear] = {}
    rows: dict[str, ModuleRow] = {}
    every = chosen.all
    for name in group.modules:
        linear = group.linear(name)
        q, covered = every[name], inputs.ranges.get(name)
        quantized[name] = inputs.quantized(name, linear, q)
        error = measure_relative_error(inputs.weight(name, linear), _values(q))
        rows[name] = ModuleRow(
            name,
            label(group.schemes.get(name), inputs.mode, group.sparsity.get(name)),
            weight_error=round_significant(error),
            range=[covered.low, covered.high] if covered else None,
            note=join_remarks(folded.remarks.get(name), chosen.remarks.get(name)),
        )
    return quantized, rows


class _RunningError:
    """Running error of one quantized module over real tokens, against its float module on the same
    input."""

    def __init__(self, float_output: nn.Linear, quantized: QuantLinear) -> None:
        self.float_output, self.quantized = float_output, quantized
        self.error = self.signal = 0.0
        self.clipped = self.seen = 0

    @property
    def enough(self) -> bool:
        """True after MEASURED tokens, enough for a precision of a percent or two."""
        return self.seen >= MEASURED * self.quantized.in_features

    def update(self, rows: Tensor) -> None:
        with torch.no_grad(), torch.autocast(rows.device.type, enabled=False):
            y, q = self.float_output(rows), self.quantized.forward(rows)  # no hooks: one called us
        self.error += float((y - q).double().square().sum())
        self.signal += float(y.double().square().sum())
        self.clipped += self.quantized.clipped(rows)
        self.seen += rows.numel()

    def report(self) -> dict[str, Any]:
        error = math.sqrt(self.error / self.signal) if self.signal else 0.0
        return {
            "output_error": round_significant(error),
            "saturation": round_significant(self.clipped / max(self.seen, 1)),
        }


def _measure(
    group: BlockGroup, quantized: Mapping[str, QuantLinear], ranges: Mapping[str, Range]
) -> dict[str, _RunningError]:
    """Move the stream through the quantized blocks; returns {module: its measured error}."""
    measures = {
        name: _RunningError(cast(nn.Linear, group.model.get_submodule(name)), q)
        for name, q in quantized.items()
    }

    def hook(name: str, rows: Tensor, _real: Tensor) -> None:
        if not measures[name].enough:
            measures[name].update(rows)

    summands = {n: replace_identity(n, ranges[n]) for n in (*group.summands, *group.caches)}
    with walk.swap_modules(group.model, {**quantized, **summands}):
        walk.advance(group, hook, quantized, group.stream.deal.first_part)
    return measures
