"""Records of a quantized folder, the same for all formats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from optimizer.foundation.qtensor import QTensor
from optimizer.foundation.state import Activations, Range
from optimizer.model.checkpoint.checkpoint import TensorPlace

ACCEPTED = "gptq, awq (gemm), compressed-tensors (pack-quantized, int-quantized)"
FLOAT_INSTEAD = "Use the float checkpoint it was made from."


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight (out, in) stored as integers, which the load stage reads as floats."""

    file: Path
    shape: tuple[int, int]
    read: Callable[[], QTensor]
    dtype: torch.dtype = torch.float32

    def dequantize(self) -> Tensor:
        return self.read().dequantize()


@dataclass(frozen=True)
class QuantizedTensors:
    """Tensors of a quantized folder that is loaded, by their names in its files.

    A quantized weight is named `<module>.weight`, whatever its packed tensors are called.
    """

    folder: Path
    method: str  # "gptq" | "awq" | "compressed-tensors"
    weights: Mapping[str, QuantizedWeight]
    floats: Mapping[str, TensorPlace]  # all other tensors
    activations: Activations = None
    ranges: Mapping[str, Range] = field(default_factory=dict)  # static activation range by module
    weight_only: tuple[str, ...] = ()  # modules with float inputs in a folder that quantizes inputs

    @property
    def stored(self) -> dict[str, TensorPlace | QuantizedWeight]:
        """Every parameter by its name in the files."""
        return {**self.floats, **self.weights}
