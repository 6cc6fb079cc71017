"""What a quantized folder is made of, whatever its format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from optimizer.foundation.qtensor import QTensor
from optimizer.foundation.state import Activations, Range
from optimizer.model.checkpoint.checkpoint import Entry

ACCEPTED = "gptq, awq (gemm), compressed-tensors (pack-quantized, int-quantized)"
FLOAT_INSTEAD = "Use the float checkpoint it was made from."


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight (out, in) stored as integers. To the load stage it is a float tensor."""

    file: Path
    shape: tuple[int, int]
    read: Callable[[], QTensor]
    dtype: torch.dtype = torch.float32

    def dequantize(self) -> Tensor:
        return self.read().dequantize()


@dataclass(frozen=True)
class Quantized:
    """A quantized folder. Names are those of its files, with `<module>.weight` for what is coded.

    method: "gptq" | "awq" | "compressed-tensors". weights: read one by one. floats: all others.
    ranges: of static activations, by module. weight_only: modules whose input stays float in a
    folder that codes inputs.
    """

    folder: Path
    method: str
    weights: Mapping[str, QuantizedWeight]
    floats: Mapping[str, Entry]
    activations: Activations = None
    ranges: Mapping[str, Range] = field(default_factory=dict)
    weight_only: tuple[str, ...] = ()

    @property
    def stored(self) -> dict[str, Entry | QuantizedWeight]:
        """Every parameter by its name in the files."""
        return {**self.floats, **self.weights}
