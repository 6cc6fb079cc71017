"""Compress the blocks of one segment, whose float weights are in memory, and move the stream on.

In order: fold smoothing, choose ranges, round the weights, correct biases, and pass the stream
through the quantized blocks while measuring. What is chosen for a block is chosen on the inputs
it will really see: those of the blocks before it after they were quantized.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from optimizer.compress.apply import rounding
from optimizer.compress.apply.autoround import learn
from optimizer.compress.apply.awq import scale
from optimizer.compress.apply.bias_correction import Shift, corrected
from optimizer.compress.apply.smoothquant import Smoothing, bad_input, range_chooser, smooth
from optimizer.compress.methods.activation_ranges import Histogram
from optimizer.compress.methods.rtn import relative_error
from optimizer.compress.simulate import QuantLinear, set_parameter
from optimizer.compress.walk import blocks as walk
from optimizer.errors import CheckpointError
from optimizer.load.families import Family
from optimizer.qtensor import QTensor, Scheme
from optimizer.recipe.schema import Activations, Quantize
from optimizer.state import Activations as InputMode
from optimizer.state import CompressedState, Note, Range

MEASURED = 2048  # tokens that a module's output error and saturation are taken over


@dataclass(frozen=True)
class Row:
    """A line of modules.json: one weighted module. Errors are relative (Frobenius norm of the
    weight, L2 of the output over calibration tokens); saturation is the share of inputs clipped.
    What was not measured is null."""

    module: str
    scheme: str
    weight_error: float | None = None
    output_error: float | None = None
    saturation: float | None = None
    range: list[float] | None = None
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def explained(row: Row, why: str) -> Row:
    """The line with `why` added to its note."""
    return replace(row, note="; ".join(filter(None, (row.note, why))))


def compress(
    model: nn.Module,
    schemes: Mapping[str, Scheme],
    quantize: Quantize,
    family: Family,
    stream: walk.Stream | None,
    segment: range,
    blocks: tuple[str, ...],
    tensors: Mapping[str, Tensor],
    scratch: Path,
) -> tuple[CompressedState, list[Row], dict[str, Tensor]]:
    """The state, its lines of the report, and what was added to biases, {bias: correction}.

    model: a skeleton whose `blocks` hold their float weights, which smoothing changes.

    schemes: of the modules to quantize in these blocks. stream None: no calibration data, so
    nothing is measured, and weights are read from `tensors` one at a time. scratch: a folder for
    activations that memory has no room for. Raises CheckpointError naming a weight or input that
    holds NaN.
    """
    activations = quantize.activations
    mode = activations.granularity if activations else None
    if stream is None:
        return *_uncalibrated(schemes, tensors, mode), {}
    smoothing, ranges = Smoothing(), dict[str, Range]()
    if schemes:
        if "smoothquant" in quantize.transforms:
            smoothing = smooth(model, schemes, quantize, family, stream, segment, blocks)
        if "awq" in quantize.transforms:
            smoothing.add(scale(model, schemes, family, stream, segment, blocks))
        if activations is not None and mode == "tensor":
            ranges = _ranges(model, schemes, activations, stream, segment, smoothing.factors)
    inputs = rounding.Inputs(mode, ranges, smoothing.factors)
    chosen = rounding.choose(model, schemes, quantize, inputs, stream, segment, scratch)
    replaced, notes = smoothing.replaced, smoothing.notes
    if "autoround" in quantize.rounders and schemes:
        learned = learn(model, chosen.weights, quantize.autoround, family, stream, segment, blocks)
        chosen.take(learned)
        for name, value in learned.gains.items():
            set_parameter(model, name, value)
        replaced = {**replaced, **learned.gains}
    weights = {f"{name}.weight": q for name, q in chosen.weights.items()}
    quantized, rows = _replaced_by(model, schemes, inputs, chosen, smoothing)
    corrections: dict[str, Tensor] = {}
    if quantize.bias_correction:
        biases, corrections, why = _correct(model, quantized, stream, segment)
        replaced, notes = {**replaced, **biases}, [*notes, *why]
    measured = _measured(model, quantized, stream, segment)
    rows = {n: replace(row, **measured[n].report()) for n, row in rows.items()}
    state = CompressedState(
        weights,
        replaced,
        ranges={f"{n}:input": r for n, r in ranges.items()},
        factors={f"{n}:input": f for n, f in smoothing.factors.items()},
        activations=mode,
        notes=tuple(notes),
    )
    return state, list(rows.values()), corrections


def _replaced_by(
    model: nn.Module,
    schemes: Mapping[str, Scheme],
    inputs: rounding.Inputs,
    chosen: rounding.Rounded,
    smoothing: Smoothing,
) -> tuple[dict[str, QuantLinear], dict[str, Row]]:
    """What stands in for each module, and what the report says before anything is measured."""
    quantized: dict[str, QuantLinear] = {}
    rows: dict[str, Row] = {}
    for name, scheme in schemes.items():
        linear = cast(nn.Linear, model.get_submodule(name))
        q, covered = chosen.weights[name], inputs.ranges.get(name)
        quantized[name] = inputs.quantized(name, linear, q)
        rows[name] = Row(
            name,
            label(scheme, inputs.mode),
            weight_error=rounded(relative_error(inputs.weight(name, linear), q.dequantize())),
            range=[covered.low, covered.high] if covered else None,
            note="; ".join(filter(None, (smoothing.said.get(name), chosen.said.get(name)))),
        )
    return quantized, rows


def compares(quantize: Quantize) -> bool:
    """Whether a method looks at what the float model computes at the same place."""
    return "autoround" in quantize.rounders or (
        "gptq" in quantize.rounders and quantize.float_target
    )


def _uncalibrated(
    schemes: Mapping[str, Scheme], tensors: Mapping[str, Tensor], mode: InputMode
) -> tuple[CompressedState, list[Row]]:
    """Every weight rounded by itself, one in memory at a time."""
    weights: dict[str, QTensor] = {}
    rows = []
    for name, scheme in schemes.items():
        weights[f"{name}.weight"], row = rounded_alone(name, tensors[f"{name}.weight"], scheme)
        rows.append(replace(row, scheme=label(scheme, mode)))
    return CompressedState(weights, activations=mode), rows


def rounded_alone(name: str, weight: Tensor, scheme: Scheme) -> tuple[QTensor, Row]:
    """Round to nearest, and the line of the report."""
    q = rounding.nearest_one(name, weight, scheme)
    error = rounded(relative_error(weight, q.dequantize()))
    return q, Row(name, label(scheme, None), weight_error=error)


def label(scheme: Scheme, activations: str | None) -> str:
    """ "W8 channel, A8 tensor": the scheme in the report's words."""
    size = f" {scheme.group_size}" if scheme.group_size else ""
    sign = "" if scheme.symmetric else " asymmetric"
    inputs = f", A8 {activations}" if activations else ""
    return f"W{scheme.bits} {scheme.granularity}{size}{sign}{inputs}"


def rounded(value: float) -> float:
    """Six significant digits: more would be noise in a report."""
    return float(f"{value:.6g}")


def _ranges(
    model: nn.Module,
    names: Collection[str],
    activations: Activations,
    stream: walk.Stream,
    segment: range,
    factors: Mapping[str, Tensor],
) -> dict[str, Range]:
    """One range per module, over all uses of its block; modules of one tensor share theirs."""
    leader = walk.sharing(model, stream, segment, names)
    histograms = {name: Histogram() for name in leader.values()}

    def see(name: str, rows: Tensor, _real: Tensor) -> None:
        try:
            histograms[name].update(rows * factors[name] if name in factors else rows)
        except ValueError as e:
            raise bad_input(name, e) from e

    walk.run(model, stream, segment, see, names)
    unused = [n for n in names if n not in leader]
    if unused:
        raise CheckpointError(
            "never ran on the calibration data, so its range is unknown",
            where=unused[0],
            fix="Add it to keep_float.",
        )
    choose = range_chooser(activations)
    chosen = {name: choose(histogram) for name, histogram in histograms.items()}
    return {n: chosen[leader[n]] for n in names}


class _Measure:
    """Running sums over the real tokens of one module, against its float self on the same input."""

    def __init__(self, exact: nn.Linear, quantized: QuantLinear) -> None:
        self.exact, self.quantized = exact, quantized
        self.error = self.signal = 0.0
        self.clipped = self.seen = 0

    @property
    def enough(self) -> bool:
        """A relative error over so many tokens is known to a percent or two."""
        return self.seen >= MEASURED * self.quantized.in_features

    def update(self, rows: Tensor) -> None:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            y, q = self.exact(rows), self.quantized.forward(rows)  # no hooks: one called us
        self.error += float((y - q).double().square().sum())
        self.signal += float(y.double().square().sum())
        self.clipped += self.quantized.clipped(rows)
        self.seen += rows.numel()

    def report(self) -> dict[str, Any]:
        return {
            "output_error": rounded(math.sqrt(self.error / self.signal)) if self.signal else 0.0,
            "saturation": rounded(self.clipped / max(self.seen, 1)),
        }


def _measured(
    model: nn.Module,
    quantized: Mapping[str, QuantLinear],
    stream: walk.Stream,
    segment: range,
) -> dict[str, _Measure]:
    """Move the stream through the quantized blocks, measuring each module on the way."""
    measures = {
        name: _Measure(cast(nn.Linear, model.get_submodule(name)), q)
        for name, q in quantized.items()
    }

    def see(name: str, rows: Tensor, _real: Tensor) -> None:
        if not measures[name].enough:
            measures[name].update(rows)

    with walk.swapped(model, quantized):
        walk.run(model, stream, segment, see, quantized, shared=False, advance=True)
    return measures


def _correct(
    model: nn.Module,
    quantized: Mapping[str, QuantLinear],
    stream: walk.Stream,
    segment: range,
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Note]]:
    """Give the quantized modules corrected biases; returns these, what was added to each, and who
    has none to correct."""
    shifts = {name: Shift(q.out_features) for name, q in quantized.items() if q.bias is not None}
    exact = {name: cast(nn.Linear, model.get_submodule(name)) for name in shifts}

    def see(name: str, rows: Tensor, _real: Tensor) -> None:
        q = quantized[name]
        with torch.autocast("cpu", enabled=False):  # bf16 rounds by as much as the shift is
            shifts[name].update(exact[name].forward(q.within(rows)), q.forward(rows))

    with walk.swapped(model, quantized):
        walk.run(model, stream, segment, see, shifts, shared=False)
    biases: dict[str, Tensor] = {}
    corrections = {f"{name}.bias": shift.value for name, shift in shifts.items()}
    for name in shifts:
        value = corrected(cast(Tensor, quantized[name].bias), corrections[f"{name}.bias"])
        quantized[name].bias = nn.Parameter(value, requires_grad=False)
        biases[f"{name}.bias"] = value
    why = "bias not corrected: the module has none"
    notes = [Note(name, "fallback", why) for name in quantized if name not in shifts]
    return biases, corrections, notes
