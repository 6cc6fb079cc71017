"""Read compressed-tensors checkpoints, which llm-compressor writes and vLLM serves.

A linear `m` (out, in), by the format of its config group (bytes:
lower/compressed_tensors/tensors.py):

    pack-quantized    m.weight_packed, m.weight_shape, m.weight_scale, m.weight_zero_point (packed
                      along the outputs; older writers left it int8, one a scale)
    int-quantized     m.weight int8, m.weight_scale, m.weight_zero_point int8
    naive-quantized   the same
    float-quantized   m.weight float8_e4m3fn, m.weight_scale; `find` reads it for its writer alone
    nvfp4-pack-quantized   m.weight_packed uint8, m.weight_scale float8_e4m3fn,
                      m.weight_global_scale; the same

and m.input_scale, m.input_zero_point where inputs are quantized by static ranges. A group's targets
are names of modules, patterns ("re:...") or classes ("Linear"), in this order of precedence, as in
compressed_tensors.utils.match. Of several groups that target classes, the one that fits the tensors
applies.

Source: compressed_tensors 0.20, compressors/pack_quantized, compressors/naive_quantized,
quantization/quant_args.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.packing import unpack32
from optimizer.foundation.qtensor import BLOCK, Granularity, QTensor, Scheme
from optimizer.foundation.rounding import float4, float8
from optimizer.foundation.state import STATIC, Activations, Range
from optimizer.load.quantized.module import (
    SCALES,
    QuantizedModule,
    check_grouping,
    find_modules,
    select_other_entries,
    to_signed,
)
from optimizer.load.quantized.parts import (
    ACCEPTED,
    FLOAT_INSTEAD,
    QuantizedTensors,
    QuantizedWeight,
)
from optimizer.model.checkpoint.checkpoint import TensorPlace

INPUT = ("input_scale", "input_zero_point", "input_global_scale")
PACKED = ("weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx")
INTEGER = ("weight", "weight_scale", "weight_zero_point")
FORMATS = ("pack-quantized", "int-quantized", "naive-quantized", "mixed-precision")
FLOAT8, FLOAT4 = "float-quantized", "nvfp4-pack-quantized"
GLOBAL = "weight_global_scale"
WHOLE = (torch.int8, torch.float8_e4m3fn)  # types of weights that are not packed
Group = Mapping[str, Any]


def read(
    folder: Path, config: Mapping[str, Any], entries: Mapping[str, TensorPlace]
) -> QuantizedTensors:
    """Read the packed weights of a compressed-tensors checkpoint. Raises CheckpointError as
    folder.py lists."""
    where = f"{folder / 'config.json'}: quantization_config"
    of_float8 = any(e.dtype == torch.float8_e4m3fn for e in entries.values())  # `find` takes them
    groups = _config_groups(config, where, (*FORMATS, FLOAT8, FLOAT4) if of_float8 else FORMATS)
    quantized = find_modules(entries, "weight_packed", (*PACKED, *INPUT, GLOBAL))
    scaled = find_modules(entries, "weight_scale", (*INTEGER, *INPUT))
    whole = {n: m for n, m in scaled.items() if n not in quantized}
    quantized |= {n: m for n, m in whole.items() if m.entry("weight").dtype in WHOLE}
    weights: dict[str, QuantizedWeight] = {}
    inputs: dict[str, Activations] = {}
    ranges: dict[str, Range] = {}
    for name, module in quantized.items():
        group = _group_of(module, groups)
        scheme, shape = _scheme(module, group)
        file = module.tensors["weight_scale"].file
        weights[f"{name}.weight"] = QuantizedWeight(
            file, shape, partial(_read, module, scheme, shape)
        )
        inputs[name] = _activations(module, group)
        if inputs[name] in STATIC:
            ranges[name] = _range(module, group["input_activations"])
    kinds = {kind for kind in inputs.values() if kind is not None}
    if len(kinds) > 1:
        raise CheckpointError(
            "some inputs are quantized by static ranges and some at run time",
            where=where,
            accepted="one of the two",
            fix=FLOAT_INSTEAD,
        )
    return QuantizedTensors(
        folder,
        "compressed-tensors",
        weights,
        select_other_entries(entries, quantized),
        activations=next(iter(kinds), None),
        ranges=ranges,
        weight_only=tuple(n for n, kind in inputs.items() if kind is None) if kinds else (),
    )


def _config_groups(config: Mapping[str, Any], where: str, accepted: tuple[str, ...]) -> list[Group]:
    """Read the config groups, which say how modules are quantized. Raises CheckpointError for a
    format that is not accepted, or a feature that is not covered."""
    groups = list((config.get("config_groups") or {}).values())
    formats = [config.get("format"), *(g.get("format") for g in groups if isinstance(g, Mapping))]
    for name in formats:
        if name is not None and name not in accepted:
            raise CheckpointError(
                f"compressed-tensors format {name!r}",
                where=f"{where}.format",
                accepted=ACCEPTED,
                fix=FLOAT_INSTEAD,
            )
    if not groups or not all(isinstance(g, Mapping) and g.get("weights") for g in groups):
        raise CheckpointError(
            "config_groups has a group without weights",
            where=f"{where}.config_groups",
            fix=FLOAT_INSTEAD,
        )
    status = config.get("quantization_status", "compressed")
    if status != "compressed":
        raise CheckpointError(
            f"quantization_status is {status!r}: the weights are not stored as integers",
            where=f"{where}.quantization_status",
            accepted="compressed",
            fix="Save it compressed (save_pretrained(..., save_compressed=True)).",
        )
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    extras = {
        "transform_config": bool(config.get("transform_config")),
        "kv_cache_scheme": bool(config.get("kv_cache_scheme")),
        "sparsity_config": sparsity != "dense",
        "output_activations": any(g.get("output_activations") for g in groups),
    }
    for name, there in extras.items():
        if there:
            raise CheckpointError(
                "the model needs it at run time, and no target here supports it",
                where=f"{where}.{name}",
                fix=FLOAT_INSTEAD,
            )
    return groups


def _group_of(module: QuantizedModule, groups: list[Group]) -> Group:
    """Find the config group of a compressed-tensors checkpoint that a module belongs to: by name,
    by pattern, or by class and shape."""
    name = module.name
    for group in groups:
        if name in group.get("targets", ()):
            return group
    for group in groups:
        if any(t[:3] == "re:" and re.match(t[3:], name) for t in group.get("targets", ())):
            return group
    classes = [g for g in groups if any(t.isidentifier() for t in g.get("targets", ()))]
    fitting = [g for g in classes if _fits(module, g)]
    if len(fitting) == 1 or (fitting and all(g == fitting[0] for g in fitting)):
        return fitting[0]
    if len(classes) == 1:
        return classes[0]  # a caller that reads the module reports what does not fit
    raise module.wrong(
        f"{len(fitting)} config groups fit it",
        accepted="one",
        fix="Name it in one group's targets.",
    )


def _fits(module: QuantizedModule, group: Group) -> bool:
    try:
        _scheme(module, group)
    except CheckpointError:
        return False
    return True


def _scheme(module: QuantizedModule, group: Group) -> tuple[Scheme, tuple[int, int]]:
    """Read scheme and shape of a module's packed weight in a compressed-tensors checkpoint. Raises
    CheckpointError when headers disagree."""
    weights = group["weights"]
    bits, strategy = int(weights.get("num_bits", 8)), weights.get("strategy")
    symmetric = bool(weights.get("symmetric", True))
    size = weights.get("group_size")
    strategy = strategy or ("tensor" if size is None else "channel" if size == -1 else "group")
    if weights.get("type") == "float" and bits == 4:
        return _float4_scheme(module, weights, strategy)
    if weights.get("type") == "float":
        return _float8_scheme(module, weights, strategy)
    if weights.get("type", "int") != "int" or bits not in (3, 4, 8):
        raise module.wrong(f"weights of type {weights.get('type')}{bits}", accepted="int 3, 4, 8")
    if strategy not in ("tensor", "channel", "group"):
        raise module.wrong(f"strategy {strategy!r}", accepted="tensor, channel, group")
    out, inputs = shape = _shape(module, bits)
    rows = module.entry("weight_scale", *SCALES).shape
    if strategy == "tensor":
        if rows not in ((), (1,), (1, 1)):
            raise module.wrong(f"weight_scale is {rows}", accepted="one value")
        scheme = Scheme(bits, symmetric, "tensor")
    else:
        groups = rows[1] if len(rows) == 2 else 1
        module.expect("weight_scale", (out, groups) if len(rows) == 2 else (out,))
        kind, per = check_grouping(module, inputs, groups, -1 if strategy == "channel" else size)
        granularity: Granularity = "group" if kind == "group" and strategy == "group" else "channel"
        scheme = Scheme(bits, symmetric, granularity, per if granularity == "group" else None)
    if not symmetric:
        module.entry("weight_zero_point", torch.int8, torch.int32)
    return scheme, shape


def _float8_scheme(
    module: QuantizedModule, weights: Group, strategy: str
) -> tuple[Scheme, tuple[int, int]]:
    bits, symmetric = weights.get("num_bits"), weights.get("symmetric", True)
    size = weights.get("block_structure")
    block = strategy == "block" and size == [BLOCK, BLOCK]
    if (bits, symmetric) != (8, True) or not (strategy == "channel" or block):
        raise module.wrong(
            f"weights of type float{bits}, strategy {strategy} {size or ''}, symmetric {symmetric}",
            accepted=f"float8, one scale per row or per block of {BLOCK} x {BLOCK}, symmetric",
        )
    scheme = Scheme(8, granularity="block" if block else "channel", type="float8")
    out, inputs = module.entry("weight", torch.float8_e4m3fn).shape
    module.entry("weight_scale", *SCALES)
    try:
        module.expect("weight_scale", scheme.shape_of_scale(out, inputs))
    except ValueError as e:
        raise module.wrong(str(e)) from None
    return scheme, (out, inputs)


def _float4_scheme(
    module: QuantizedModule, weights: Group, strategy: str
) -> tuple[Scheme, tuple[int, int]]:
    if (strategy, weights.get("group_size")) != ("tensor_group", float4.GROUP):
        raise module.wrong(f"weights of type float4, strategy {strategy}", accepted="NVFP4")
    out, half = module.entry("weight_packed", torch.uint8).shape
    scheme = Scheme(4, True, "group", float4.GROUP, type="float4")
    module.entry("weight_scale", torch.float8_e4m3fn)
    module.expect("weight_scale", scheme.shape_of_scale(out, 2 * half))
    module.entry(GLOBAL, torch.float32)
    return scheme, (out, 2 * half)


def _shape(module: QuantizedModule, bits: int) -> tuple[int, int]:
    if "weight_packed" not in module.tensors:
        if bits != 8:
            raise module.wrong(f"int8 weights, but the config has {bits} bits", accepted="8")
        out, inputs = module.entry("weight", torch.int8).shape
        return out, inputs
    module.entry("weight_packed", torch.int32)
    module.entry("weight_shape", torch.int64, torch.int32)
    module.expect("weight_shape", (2,))
    out, inputs = module.tensor("weight_shape").tolist()
    module.expect("weight_packed", (out, -(-inputs * bits // 32)))
    return out, inputs


def _activations(module: QuantizedModule, group: Group) -> Activations:
    """Return how a compressed-tensors checkpoint quantizes a module's inputs, as a mode of the
    state; None for float. Raises CheckpointError for a way that a state cannot hold."""
    inputs = group.get("input_activations")
    if inputs is None:
        return None
    dynamic, strategy = inputs.get("dynamic", False), inputs.get("strategy")
    whole = inputs.get("num_bits") == 8 and inputs.get("type", "int") == "int"
    if whole and dynamic is True and strategy == "token" and inputs.get("symmetric", True):
        return "token"
    of_float = inputs.get("type") == group["weights"].get("type") == "float"
    if of_float and inputs.get("num_bits") == 8:
        size = inputs.get("group_size")
        kinds: dict[Any, Activations] = {
            ("tensor", False, None): "float8 tensor",
            ("token", True, None): "float8 token",
            ("group", True, BLOCK): "float8 group",
        }
        if (strategy, dynamic, size) in kinds:
            return kinds[strategy, dynamic, size]
    if of_float and (inputs.get("num_bits"), strategy, dynamic) == (4, "tensor_group", "local"):
        return "float4 group"
    if whole and dynamic is False and strategy in ("tensor", None):
        return "tensor"
    raise module.wrong(
        f"inputs quantized to {inputs.get('num_bits')} bits, strategy {strategy}, dynamic "
        f"{dynamic}, symmetric {inputs.get('symmetric', True)}",
        accepted="8 bits: per token, dynamic and symmetric; or per tensor, static",
    )


def _range(module: QuantizedModule, inputs: Group) -> Range:
    """Return the activation range of a compressed-tensors checkpoint, whose integers are round(x /
    scale) + zero point, -128..127."""
    if inputs.get("num_bits") == 4:
        module.entry("input_global_scale", torch.float32)
        largest = float4.LARGEST * float8.LARGEST / float(module.tensor("input_global_scale"))
        return Range(-largest, largest)
    module.entry("input_scale", *SCALES)
    scale, zero = float(module.tensor("input_scale").reshape(-1)[0]), 0
    if inputs.get("type") == "float":
        return Range(-float8.LARGEST * scale, float8.LARGEST * scale)
    if not inputs.get("symmetric", True):
        module.entry("input_zero_point", torch.int8, torch.int32)
        zero = int(module.tensor("input_zero_point").reshape(-1)[0])
    try:
        interval = Range(-(zero + 128) * scale, (127 - zero) * scale)
    except ValueError as e:
        raise module.wrong(str(e)) from None
    if interval.scale != scale or interval.zero_point != zero + 128:
        raise module.wrong(
            f"input_scale {scale} is not a bfloat16 value inside float16's normal range",
            fix="Quantize again from the float checkpoint, or use a weight-only one.",
        )
    return interval


def _read(module: QuantizedModule, scheme: Scheme, shape: tuple[int, int]) -> QTensor:
    bits, (out, inputs) = scheme.bits, shape
    if scheme.type == "float4":
        scale = module.tensor("weight_scale").float() / module.tensor(GLOBAL)
        return module.qtensor(float4.unpack(module.tensor("weight_packed")), scale, None, scheme)
    if "weight_g_idx" in module.tensors:
        order, groups = module.tensor("weight_g_idx").long(), scheme.groups(inputs)
        if not torch.equal(order, torch.arange(inputs) // (inputs // groups)):
            raise module.wrong(
                "its groups do not follow the order of the inputs (actorder: group)",
                fix="Use a checkpoint made with actorder: weight, or the float one.",
            )
    if "weight_packed" in module.tensors:
        packed = module.tensor("weight_packed").numpy()
        integers = to_signed(torch.from_numpy(unpack32(packed, bits, inputs)), bits)
    else:
        integers = module.tensor("weight")
    scale = module.tensor("weight_scale")
    scale = scale.reshape(scheme.shape_of_scale(out, inputs)[0], -1)
    return module.qtensor(integers, scale, _zero_point(module, scheme, scale), scheme)


def _zero_point(module: QuantizedModule, scheme: Scheme, scale: Tensor) -> Tensor | None:
    if "weight_zero_point" not in module.tensors:
        return None
    zero = module.tensor("weight_zero_point")
    if scheme.symmetric:
        if zero.any():
            raise module.wrong(
                "symmetric is true, but weight_zero_point is not 0",
                fix="Correct symmetric in config_groups.",
            )
        return None
    if zero.dtype == torch.int32:
        rows = len(scale)
        module.expect("weight_zero_point", (-(-rows * scheme.bits // 32), scale.shape[1]))
        words = zero.t().contiguous().numpy()
        unsigned = torch.from_numpy(unpack32(words, scheme.bits, rows)).t()
        return to_signed(unsigned, scheme.bits).contiguous()
    if zero.numel() != scale.numel():
        module.expect("weight_zero_point", tuple(scale.shape))
    return zero.reshape(scale.shape)
