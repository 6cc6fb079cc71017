"""Check the compressed-tensors folder with that project's own reader and with transformers.

    lower    every value that the reader returns, compared with the state's bit for bit
    engine   outputs of transformers on the CPU, in float32, and of each quantized module there on
             the input that it gets, compared with the state in torch with its floats rounded as the
             folder stores them

The outputs of vLLM are not judged: its kernels run on other machines.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from optimizer.compress.simulate import QuantLinear, simulate_state
from optimizer.foundation.process.quiet import quiet
from optimizer.foundation.qtensor import BLOCK, QTensor
from optimizer.foundation.state import PER_TOKEN, STATIC, Activations, owner_of, weight_name
from optimizer.lower.compressed_tensors import tensors as format_
from optimizer.model.checkpoint.model import choose_auto_class, join_outputs, load_torch_model
from optimizer.validate.formats import modules
from optimizer.validate.formats.transformers_runner import TransformersRunner, translate_errors
from optimizer.validate.ledger import trace
from optimizer.validate.ledger.distance import Distance
from optimizer.validate.ledger.entry import HopOutputs, LedgerEntry, make_entry
from optimizer.validate.ledger.ledger import STATE_HOPS, Hop
from optimizer.validate.materials import Materials

TARGET = "target compressed-tensors"
ELSEWHERE = "the kernels of vLLM, which serves the folder, are not run here"
INT8_TOKENS = (
    "outputs are measured and not judged, only those of each module: to quantize inputs to int8 "
    "token by token, transformers divides the largest value by 127.5, and the state, like vLLM, "
    "by 127"
)


def hops(_m: Materials) -> tuple[Hop, ...]:
    """List the hops of the ledger: those of the compressed state, then `lower`, `engine` and
    `harness`. There is no ONNX graph, and the harness does not run the folder."""
    return (*STATE_HOPS, lower, engine, harness)


def lower(m: Materials) -> LedgerEntry:
    """Hop `lower`: compare every value of the folder, as the compressed-tensors package reads it,
    with the compressed state."""
    with translate_errors("the compressed-tensors package", TARGET):
        problems = [*_scales(m), *_weights(m), *_floats(m), *_ranges(m), *_caches(m)]
    why = "the same integers times the same scales give the same bits"
    same = Distance(0.0, 0.0, 1.0, 0.0)
    measured = None if problems else same
    return LedgerEntry("lower", "state in torch", 0.0, measured, not problems, why, tuple(problems))


def engine(m: Materials) -> LedgerEntry:
    """Hop `engine`: compare the outputs of the model that transformers loads from the folder, and
    of each quantized module in it, with the compressed state in torch."""
    outputs = m.compared
    with translate_errors("transformers", TARGET):
        model, problems = _load(m)
        results = [trace.run(model, batch, outputs) for batch in m.batches]
    stored = _as_stored(m)
    expected = [trace.trace_run(stored, batch, outputs, ()) for batch in m.batches]
    start = "state in torch, floats as stored"
    quantized = [name for name in m.judged_alone if name in m.lowering["modules"]]
    parts = modules.judge(model, stored, quantized, [m.batches[i] for i in m.sampled])
    if m.state.activations == "token":
        measured = m.output_distance(results, expected)
        problems += [p.problem for p in sorted(parts, key=lambda p: -p.ratio) if not p.fine]
        fine = not problems and bool(np.isfinite(measured.worst))
        why = INT8_TOKENS
        return LedgerEntry(
            "engine", start, None, measured, fine, why, tuple(problems), why, pieces=tuple(parts)
        )
    spread = m.correct.graph_outputs("state", "fp32")
    entry = make_entry("engine", start, HopOutputs(results, expected, spread), problems, parts)
    entry = replace(entry, why=f"{entry.why}; {ELSEWHERE}")
    return entry.with_unproven(ELSEWHERE, m.not_judged_alone)


def harness(_m: Materials) -> LedgerEntry:
    """Hop `harness`: an entry that reports that the harness does not run the folder. It is the last
    hop, after which the ledger frees the models."""
    why = "transformers and vLLM run the folder, the harness does not"
    return LedgerEntry("harness", "torch", None, None, None, why)


def open_runner(m: Materials, _device: str) -> TransformersRunner:
    """Open the compressed-tensors folder in transformers on the CPU, as the candidate of the
    quality gates."""
    return TransformersRunner(_load(m)[0], _folder(m), m)


def _folder(m: Materials) -> Path:
    return m.model / "model"


def _load(m: Materials) -> tuple[nn.Module, list[str]]:
    """Load the folder by transformers: (model in float32, sentences on missing or unused tensors).

    transformers 5.23 loads asymmetric packed weights only when it de-quantizes them at once, and
    then leaves inputs float. NVFP4 with quantized inputs is de-quantized to bf16 here, as the first
    run of the model would do otherwise, so that float32 inputs can be multiplied.
    """
    from transformers import CompressedTensorsConfig

    options: dict[str, Any] = {}
    if _dequantizes(m):
        options["quantization_config"] = CompressedTensorsConfig(dequantize=True)
    with quiet():
        model, info = choose_auto_class(
            m.task, m.checkpoint.config.get("model_type")
        ).from_pretrained(
            _folder(m),
            attn_implementation="eager",
            dtype=torch.float32,
            output_loading_info=True,
            **options,
        )
    if m.state.activations == "float4 group":
        model.hf_quantizer.compressor.decompress_model(model)
    join_outputs(model, m.task)
    modules = {name for name, _ in m.float_model.named_modules()}  # without an unused pooler
    info["missing_keys"] = [n for n in info["missing_keys"] if n.rpartition(".")[0] in modules]
    problems = [f"transformers: {kind}: {sorted(map(str, n))[:3]}" for kind, n in info.items() if n]
    for parameter in model.parameters():
        if parameter.dtype == torch.bfloat16:  # of NVFP4, whose values bf16 holds
            parameter.data = parameter.data.float()
    return model.eval(), problems


def _dequantizes(m: Materials) -> bool:
    """Return True where transformers must de-quantize the weights while it loads the folder."""
    schemes = [m.state.scheme(name) for name in m.state.weights]
    alone = m.state.activations is None
    return any(not s.symmetric or (s.type == "float4" and alone) for s in schemes)


def _as_stored(m: Materials) -> nn.Module:
    """The state in torch with every float rounded to the type that the folder stores it in."""
    dtype, state = format_.DTYPES[m.precision], m.state
    if not m.lowering["exact"]:
        weights = {name: _scale_as_stored(q, dtype) for name, q in state.weights.items()}
        state = replace(state, weights=weights)
    model = simulate_state(load_torch_model(m.checkpoint, m.task), state)
    dequantized = _dequantizes(m)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if dequantized or not (isinstance(module, QuantLinear) and name == "values"):
                parameter.data = parameter.data.to(dtype).float()
    return model


def _scale_as_stored(q: QTensor, dtype: torch.dtype) -> QTensor:
    return replace(q, scale=q.scale.to(dtype).float())


class _FolderTensors:
    """Tensors of the folder by name, read one by one."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        from safetensors import safe_open

        self._files: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = stack.enter_context(safe_open(path, "pt"))
            self._files |= dict.fromkeys(file.keys(), file)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)
        return tensor

    def of(self, module: str) -> dict[str, Tensor]:
        """Tensors of one module by the last part of their names."""
        names = (n for n in self._files if n.rpartition(".")[0] == module)
        return {n.removeprefix(f"{module}."): self[n] for n in names}


def _scales(m: Materials) -> Iterator[str]:
    """Yield [a problem] where the folder's float type cannot hold the state's scales without
    rounding."""
    if not m.lowering["exact"]:
        other = "fp16" if m.precision == "bf16" else "bf16"
        yield (
            f"scales change by up to {m.lowering['error']:.2g} of their value when they are stored "
            f"in {m.precision}; set float: {other} for this target"
        )


def _words(part: Any) -> tuple[Any, ...]:
    """Return (bits, type, strategy, group size, dynamic) of one part of the library's quantization
    config; group size None: no groups."""
    kind, strategy = (str(getattr(x, "value", x)) for x in (part.type, part.strategy))
    return part.num_bits, kind, strategy, part.group_size or None, bool(part.dynamic)


def _quantized_as(group: Any, q: QTensor, activations: Activations) -> bool:
    """Return True if a group of the folder's config quantizes weights and inputs as the state does.

    group: the library's QuantizationScheme for the module
    q: the module's quantized weight in the state
    activations: quantization of its inputs in the state; None: inputs stay float
    """
    scheme, inputs = q.scheme, group.input_activations
    of = "float" if scheme.is_float else "int"
    grouping = "tensor_group" if scheme.type == "float4" else scheme.granularity
    weights = (max(scheme.bits, 4), of, grouping, scheme.group_size, False)
    if group.weights.block_structure not in (None, [BLOCK, BLOCK]):
        return False
    if _words(group.weights) != weights or group.weights.symmetric != scheme.symmetric:
        return False
    if inputs is None or activations is None:
        return inputs is None and activations is None
    if activations == "float4 group":
        words = 4, of, grouping, scheme.group_size, True
        local = getattr(inputs.dynamic, "value", inputs.dynamic) == "local"
        return _words(inputs) == words and inputs.symmetric and local
    strategy = activations.removeprefix("float8 ")
    size = BLOCK if strategy == "group" else None
    same = _words(inputs) == (8, of, strategy, size, activations in PER_TOKEN)
    return same and (inputs.symmetric or activations == "tensor")


def _weights(m: Materials) -> Iterator[str]:
    """Yield a problem for each quantized weight of the folder that compressed-tensors' own
    decompressor reads with other values than the state's."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    document = json.loads((_folder(m) / "config.json").read_text(encoding="utf-8"))
    config = QuantizationConfig.model_validate(document["quantization_config"])
    groups = list(config.config_groups.values())
    dtype, lowered = format_.DTYPES[m.precision], set(m.lowering["modules"])
    with ExitStack() as stack:
        tensors = _FolderTensors(_folder(m), stack)
        for name, q in m.state.weights.items():
            module = owner_of(name)
            if module in m.lowering["decoded"]:
                continue
            if module not in lowered:
                yield f"{module}: left in float, which lowering.json does not list"
                continue
            parts = tensors.of(module)
            if "weight_scale" not in parts:
                yield f"{module}: the folder holds no quantized weight"
                continue
            parts["weight_scale"] = parts["weight_scale"].float()  # else the product is rounded
            named = [g for g in groups if module in g.targets]
            group = (named or [g for g in groups if "Linear" in g.targets])[0]
            if not _quantized_as(group, q, m.state.activations_of(module)):
                yield f"{module}: the folder's config and the state have different schemes"
                continue
            reader = BaseCompressor.get_value_from_registry(group.format or config.format)
            decompressed = reader.decompress(parts, group)["weight"]
            expected = _scale_as_stored(q, dtype).dequantize()
            if decompressed.shape != expected.shape or not torch.equal(
                decompressed.float(), expected
            ):
                yield f"{module}: its weight reads back with other values than in the state"


def _floats(m: Materials) -> Iterator[str]:
    """Yield a problem for each float parameter of the folder that differs from the state's."""
    dtype, state = format_.DTYPES[m.precision], m.state
    decoded = {weight_name(module) for module in m.lowering["decoded"]}
    head = format_.find_untied_head(m.checkpoint, state)
    with ExitStack() as stack:
        tensors = _FolderTensors(_folder(m), stack)
        for name in [*m.checkpoint.tensors, *([head] if head else [])]:
            if name in state.weights and name not in decoded:
                continue
            if name not in tensors:
                yield f"{name}: not in the folder"
                continue
            value = (
                state.weights[name].dequantize()
                if name in decoded
                else format_.read_float_value(m.checkpoint, state, name)
            )
            expected = value.to(dtype) if value.is_floating_point() else value
            if not torch.equal(tensors[name], expected):
                yield f"{name}: reads back with other values than in the state"


def _caches(m: Materials) -> Iterator[str]:
    """Yield a problem for each scale of an FP8 KV cache in the folder that differs from the
    state's."""
    from compressed_tensors.quantization import QuantizationConfig

    document = json.loads((_folder(m) / "config.json").read_text(encoding="utf-8"))
    scheme = QuantizationConfig.model_validate(document["quantization_config"]).kv_cache_scheme
    expected = format_.collect_cache_scales(m.state)
    if bool(scheme) != bool(expected):
        yield "the folder's config and the state disagree about a KV cache in FP8"
    elif scheme and _words(scheme) != (8, "float", "tensor", None, False):
        yield "the folder's config and the state have different schemes of the KV cache"
    with ExitStack() as stack:
        tensors = _FolderTensors(_folder(m), stack)
        for name, value in expected.items():
            scale = value.to(format_.DTYPES[m.precision])
            if name not in tensors or not torch.equal(tensors[name], scale):
                yield f"{name}: the KV cache has another scale than the state's"


def _ranges(m: Materials) -> Iterator[str]:
    """Yield a problem for each static range of an input that the folder gives other than the
    state."""
    dtype = format_.DTYPES[m.precision]
    if m.state.activations not in STATIC:
        return
    with ExitStack() as stack:
        tensors = _FolderTensors(_folder(m), stack)
        for module in m.lowering["modules"]:
            covered = m.state.range_of(module)
            if covered is None or m.state.activations_of(module) is None:
                continue
            parts = tensors.of(module)
            if m.state.activations == "float4 group":
                number = torch.tensor([covered.float4_global_scale])
                if not torch.equal(parts.get("input_global_scale", number[:0]), number):
                    yield f"{module}: its input has another static range than the state's"
                continue
            of_float8 = m.state.activations == "float8 tensor"
            value = covered.float8_scale if of_float8 else covered.scale
            scale = torch.tensor([value]).to(dtype)
            zero = parts.get("input_zero_point", torch.zeros(1, dtype=torch.int8))
            right = "input_scale" in parts and torch.equal(parts["input_scale"], scale)
            if not right or int(zero) != covered.zero_point - 128:
                yield f"{module}: its input has another static range than the state's"
