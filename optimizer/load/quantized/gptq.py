"""Read GPTQ checkpoints of gptqmodel, AutoGPTQ, optimum and auto-round (auto_gptq).

A linear `m` (out, in) of b bits and g groups along its inputs:

    m.qweight  int32 (in*b/32, out)      integers 0..2**b-1, b bits each along the inputs, lowest
                                         first
    m.qzeros   int32 (g, out*b/32)       zero points, packed along the outputs; minus one in
                                         checkpoint_format "gptq" (v1), unchanged in "gptq_v2"
    m.scales   float (g, out)            value = (integer - zero point) * scale
    m.g_idx    int32 (in,)               the group of each input; absent, or i // group_size, or
                                         in another order (desc_act)

Sources: AutoGPTQ auto_gptq/nn_modules/qlinear/qlinear_cuda.py (pack, forward); gptqmodel
nn_modules/qlinear/__init__.py (pack_original) and utils/model.py (convert_gptq_v1_to_v2_format).
3 bits are refused, because those tools have two layouts for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.packing import unpack32
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

PARTS = ("qweight", "qzeros", "scales", "g_idx")
OFFSET = {"gptq": 1, "gptq_v2": 0}


def read(
    folder: Path, config: Mapping[str, Any], entries: Mapping[str, TensorPlace]
) -> QuantizedTensors:
    """Read the packed weights of a GPTQ checkpoint. Raises CheckpointError as folder.py lists."""
    layout = str(config.get("checkpoint_format") or config.get("format") or "gptq")
    if layout not in OFFSET:
        raise CheckpointError(
            f"a GPTQ checkpoint in the layout {layout!r}",
            where=f"{folder / 'config.json'}: quantization_config.checkpoint_format",
            accepted=", ".join(OFFSET),
            fix="Save it in one of these with the tool that wrote it.",
        )
    quantized = find_modules(entries, "qweight", PARTS)
    weights = {
        f"{name}.weight": QuantizedWeight(
            module.entry("qweight").file, *_shape_and_reader(module, config, OFFSET[layout])
        )
        for name, module in quantized.items()
    }
    return QuantizedTensors(folder, "gptq", weights, select_other_entries(entries, quantized))


def _shape_and_reader(
    module: QuantizedModule, config: Mapping[str, Any], offset: int
) -> tuple[tuple[int, int], Any]:
    """Return the shape of a GPTQ checkpoint's weight, checked against the headers, and the function
    that reads it."""
    bits = _bits(module, number(config, "bits", default=4))
    words, out = module.entry("qweight", torch.int32).shape
    inputs = words * 32 // bits
    groups = module.entry("scales", *SCALES).shape[0]
    module.expect("scales", (groups, out))
    module.entry("qzeros", torch.int32)
    module.expect("qzeros", (groups, -(-out * bits // 32)))
    if "g_idx" in module.tensors:
        module.entry("g_idx", torch.int32, torch.int64)
        module.expect("g_idx", (inputs,))
    by_module = bool(config.get("dynamic"))
    group_size = None if by_module else number(config, "group_size", default=128)
    granularity, size = check_grouping(module, inputs, groups, group_size)
    symmetric = bool(config.get("sym", True))
    scheme = Scheme(bits, symmetric, cast(Granularity, granularity), size)
    return (out, inputs), partial(_read, module, scheme, inputs, offset, by_module)


def _bits(module: QuantizedModule, configured: int) -> int:
    """Return the bits of a module's packed weight in a GPTQ checkpoint: the config's, 4 or 8, or
    the other number where only that fits its shapes."""
    words, out = module.entry("qweight").shape
    zeros = module.entry("qzeros").shape[-1]
    inputs = module.tensors["g_idx"].shape[0] if "g_idx" in module.tensors else None
    for bits in (configured, 4, 8):
        fits = zeros == -(-out * bits // 32) and inputs in (None, words * 32 // bits)
        if bits in (4, 8) and fits:
            return bits
    raise module.wrong(
        f"weights of {configured} bits, or qzeros of another shape", accepted="4, 8 bits"
    )


def _read(
    module: QuantizedModule, scheme: Scheme, inputs: int, offset: int, by_module: bool
) -> QTensor:
    bits = scheme.bits
    if "g_idx" in module.tensors:
        groups = module.tensors["scales"].shape[0]
        order = module.tensor("g_idx").long()
        if not torch.equal(order, torch.arange(inputs) // (inputs // groups)):
            raise module.wrong(
                "its groups do not follow the order of the inputs (desc_act), which no runtime "
                "here supports",
                fix="Use a checkpoint made with desc_act: false or static_groups: true, or one "
                "scale per channel (group_size: -1), or the float checkpoint.",
            )
    words = module.tensor("qweight").t().contiguous().numpy()
    integers = to_signed(torch.from_numpy(unpack32(words, bits, inputs)), bits)
    scale = module.tensor("scales").t()
    packed = unpack32(module.tensor("qzeros").numpy(), bits, len(integers))
    zero = torch.from_numpy(packed).t().to(torch.int16) + offset
    if int(zero.max()) >= 1 << bits:
        raise module.wrong(
            f"a zero point is {int(zero.max())}, too large for {bits} bits: the file holds 0 minus "
            "one, which readers interpret differently",
            fix="Save it with checkpoint_format: gptq_v2.",
        )
    zero_point = to_signed(zero, bits).contiguous()
    if scheme.symmetric and zero_point.any():
        if not by_module:
            raise module.wrong(
                f"sym is true, but a zero point is {int(zero[zero_point != 0][0])} instead of "
                f"{1 << (bits - 1)}",
                fix="Correct checkpoint_format (gptq stores zero points minus one, gptq_v2 "
                "unchanged), or sym.",
            )
        scheme = Scheme(bits, False, scheme.granularity, scheme.group_size)
    return module.qtensor(integers, scale, None if scheme.symmetric else zero_point, scheme)
