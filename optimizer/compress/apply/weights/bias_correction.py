"""Correct the mean shift that quantization causes in a module's output (Nagel et al. 2019,
"Data-free quantization through weight equalization and bias correction", section 4.2, empirical
form).

Rounding errors do not average out when inputs have a mean, or lie on one side of an integer (a
GELU's small negative outputs): the output shifts by E[W x] - E[Wq xq], a constant per output
feature, which is added to the bias. For a convolution the mean is over all positions.

Clipping is excluded: x is first clamped to the range, because the large error of a few clipped
tokens would be added to all the others (docs/decisions/0026).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from optimizer.compress.simulate import QuantConvolution, QuantLinear
from optimizer.compress.walk import blocks as walk
from optimizer.compress.walk.blocks import BlockGroup
from optimizer.foundation import safetensors_stream
from optimizer.foundation.conv_geometry import flatten_positions
from optimizer.foundation.state import Note

FILE = "corrections.safetensors"


class Shift:
    """Running mean over tokens of y - yq, the error of a quantized module's output: y is the float
    output on the same input, clamped to the range."""

    def __init__(self, features: int, device: torch.device | None = None) -> None:
        self._sum = torch.zeros(features, dtype=torch.float64, device=device)
        self._count = 0

    def update(self, float_output: Tensor, quantized: Tensor) -> None:
        """Add the outputs of a batch, (tokens, features) each."""
        self._sum += (float_output.double() - quantized.double()).sum(0)
        self._count += len(float_output)

    def merge(self, later: Shift) -> None:
        """Add the outputs' errors on later batches, which another process may have computed."""
        self._sum += later._sum
        self._count += later._count

    @property
    def value(self) -> Tensor:
        """The shift (features,) float32, to be added to the bias."""
        return (self._sum / max(self._count, 1)).float()


def correct_bias(bias: Tensor, shift: Tensor) -> Tensor:
    """Return bias + shift, (out,), by which quantized and float output have equal means."""
    return bias + shift


def correct(
    group: BlockGroup, quantized: Mapping[str, QuantLinear]
) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Note]]:
    """Correct the biases of the quantized modules, in place.

    Returns {bias: new value}, {bias: shift added}, and a note on every module without a bias.
    """
    biased = {name: q for name, q in quantized.items() if q.bias is not None}
    float_output = {name: group.linear(name) for name in biased}

    def start() -> dict[str, Shift]:
        return {name: Shift(q.out_features, group.stream.device) for name, q in biased.items()}

    def measure(shifts: Mapping[str, Shift], part: range) -> None:
        def hook(name: str, rows: Tensor, _real: Tensor) -> None:
            q = quantized[name]
            # bf16 rounds by as much as the shift is
            with torch.autocast(rows.device.type, enabled=False):
                outputs = float_output[name].forward(q.within(rows)), q.forward(rows)
            y, yq = map(flatten_positions, outputs) if isinstance(q, QuantConvolution) else outputs
            shifts[name].update(y, yq)

        walk.observe(group, hook, shifts, part)

    with walk.swap_modules(group.model, quantized):
        shifts = group.stream.deal.sum(start, measure)
    biases: dict[str, Tensor] = {}
    corrections = {f"{name}.bias": shift.value for name, shift in shifts.items()}
    for name in shifts:
        value = correct_bias(cast(Tensor, quantized[name].bias), corrections[f"{name}.bias"])
        quantized[name].bias = nn.Parameter(value, requires_grad=False)
        biases[f"{name}.bias"] = value
    why = "bias not corrected: the module has none"
    notes = [Note(name, "fallback", why) for name in quantized if name not in shifts]
    return biases, corrections, notes


def write(corrections: Mapping[str, Tensor], folder: Path) -> None:
    """Write {bias: shift} beside a state, whose biases hold only the sums of bias and shift."""
    if corrections:
        safetensors_stream.write(sorted(corrections.items()), folder / FILE)


def read(folder: Path) -> dict[str, Tensor]:
    """Read {bias: shift} as `write` left it; {} where no bias was corrected."""
    from safetensors.torch import load_file

    path = folder / FILE
    return load_file(path) if path.is_file() else {}
