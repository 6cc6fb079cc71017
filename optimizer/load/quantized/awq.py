"""Read AWQ checkpoints in the GEMM layout of AutoAWQ.

A linear `m` (out, in) of 4 bits and g groups along its inputs:

    m.qweight  int32 (in, out/8)     integers 0..15 of 8 outputs; nibble i (lowest first) of word j
                                     is output 8*j + ORDER[i]
    m.qzeros   int32 (g, out/8)      zero points, packed alike; may be absent without zero_point
    m.scales   float16 (g, out)      value = (integer - zero point) * scale

Source: AutoAWQ awq/modules/linear/gemm.py (from_linear) and awq/utils/packing_utils.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.qtensor import Granularity, QTensor, Scheme
from optimizer.load.quantized.module import (
    SCALES,
    QuantizedModule,
    check_grouping,
    find_modules,
    number,
    select_other_entries,
    to_signed,
)
from optimizer.load.quantized.parts import QuantizedTensors, QuantizedWeight
from optimizer.model.checkpoint.checkpoint import TensorPlace

PARTS = ("qweight", "qzeros", "scales")
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def read(
    folder: Path, config: Mapping[str, Any], entries: Mapping[str, TensorPlace]
) -> QuantizedTensors:
    """Read the packed weights of an AWQ checkpoint. Raises CheckpointError as folder.py lists."""
    where = f"{folder / 'config.json'}: quantization_config"
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if version != "gemm":
        raise CheckpointError(
            f"an AWQ checkpoint in the layout {version!r}",
            where=f"{where}.version",
            accepted="gemm",
            fix="Save it with version: GEMM.",
        )
    bits = number(config, "bits", "w_bit", default=4)
    if bits != 4:
        raise CheckpointError(
            f"AWQ weights of {bits} bits",
            where=f"{where}.bits",
            accepted="4",
            fix="Use a GPTQ checkpoint for 8 bits.",
        )
    group_size = number(config, "group_size", "q_group_size", default=128)
    symmetric = not bool(config.get("zero_point", True))
    quantized = find_modules(entries, "qweight", PARTS)
    weights = {
        f"{name}.weight": QuantizedWeight(
            module.entry("qweight").file, *_shape_and_reader(module, group_size, symmetric)
        )
        for name, module in quantized.items()
    }
    return QuantizedTensors(folder, "awq", weights, select_other_entries(entries, quantized))


def _shape_and_reader(
    module: QuantizedModule, group_size: int, symmetric: bool
) -> tuple[tuple[int, int], Any]:
    inputs, words = module.entry("qweight", torch.int32).shape
    groups = module.entry("scales", *SCALES).shape[0]
    module.expect("scales", (groups, 8 * words))
    if not symmetric or "qzeros" in module.tensors:
        module.entry("qzeros", torch.int32)
        module.expect("qzeros", (groups, words))
    granularity, size = check_grouping(module, inputs, groups, group_size)
    scheme = Scheme(4, symmetric, cast(Granularity, granularity), size)
    return (8 * words, inputs), partial(_read, module, scheme)


def _read(module: QuantizedModule, scheme: Scheme) -> QTensor:
    integers = _unpack(module.tensor("qweight"))
    zero = _unpack(module.tensor("qzeros")) if "qzeros" in module.tensors else None
    if scheme.symmetric and zero is not None and zero.any():
        raise module.wrong(
            "zero_point is false, but a zero point is not 8",
            fix="Correct zero_point in quantization_config.",
        )
    scale = module.tensor("scales").t()
    return module.qtensor(integers, scale, None if scheme.symmetric else zero, scheme)


def _unpack(words: Tensor) -> Tensor:
    """Unpack int32 words of an AWQ checkpoint (rows, n) to integers -8..7, int8 (8 * n, rows)."""
    nibbles = (words[..., None] >> torch.arange(0, 32, 4, dtype=torch.int32)) & 0x0F
    ordered = torch.empty_like(nibbles)
    ordered[..., list(ORDER)] = nibbles
    return to_signed(ordered.reshape(len(words), -1).t(), 4).contiguous()
