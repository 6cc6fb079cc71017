"""Write the checkpoint and the state as a compressed-tensors folder.

Writes out/model (the folder for transformers, vLLM or SGLang; its SERVING.md has the command of
each and its objections) and out/lowering.json (see tensors.write). Everything is then read back and
compared.
"""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path

import torch

from optimizer.foundation import state as compressed_state
from optimizer.foundation.errors import LedgerError
from optimizer.foundation.qtensor import QTensor
from optimizer.foundation.state import CompressedState, input_name
from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.load.quantized import folder as quantized
from optimizer.load.quantized.parts import QuantizedWeight
from optimizer.lower.compressed_tensors import config, serving_engines
from optimizer.lower.compressed_tensors import tensors as format_
from optimizer.lower.compressed_tensors.tensors import DTYPES, FloatType
from optimizer.model.checkpoint.checkpoint import (
    Checkpoint,
    TensorPlace,
    open_checkpoint,
    read_entry,
)
from optimizer.recipe.schema import CompressedTensorsTarget
from optimizer.store import Estimate, Shapes

SERVING = "SERVING.md"


def lower(
    section: CompressedTensorsTarget, source: Path, state: Path, _graph: Path, out: Path
) -> None:
    """Write the compressed-tensors folder and lowering.json into `out`; no graph is read.

    source, state: folders of the compressed checkpoint and of the compress stage
    Raises RecipeError for the cases of config.py, LedgerError where the folder reads back
    differently.
    """
    checkpoint, compressed = open_checkpoint(source), compressed_state.read(state)
    config.check_model(checkpoint.config, "targets")
    (out / "model").mkdir()
    document = format_.write(checkpoint, compressed, out / "model", section.float)
    verify(out / "model", checkpoint, compressed, section.float)
    caches = bool(format_.collect_cache_scales(compressed))
    schemes = config.list_module_schemes(checkpoint, compressed, format_.find_embedding(checkpoint))
    rows = [(m, c.weight, c.activations) for m, c in sorted(schemes.items())]
    generates = tasks.look_up(contracts.read(source / "contract.json")).generates
    commands, warnings = serving_engines.write_notes(rows, generates=generates, float8_cache=caches)
    document["notes"] += warnings
    serving = serving_engines.write_page(commands, warnings)
    (out / "model" / SERVING).write_text(serving, encoding="utf-8")
    text = json.dumps(document, indent=1, sort_keys=True)
    (out / "lowering.json").write_text(text, encoding="utf-8")


def verify(folder: Path, checkpoint: Checkpoint, state: CompressedState, float: FloatType) -> None:
    """Check the written folder: read every parameter back with the reader of quantized checkpoints.
    Raises LedgerError naming the first that differs from the state in this float type."""
    checkpoint_read = quantized.find(folder, float8=True)
    stored = {} if checkpoint_read is None else checkpoint_read.stored
    own_head = format_.find_untied_head(checkpoint, state)
    for name in [*checkpoint.tensors, *([own_head] if own_head else [])]:
        entry = stored.get(name)
        if name in state.weights and isinstance(entry, QuantizedWeight):
            expected = _as_stored(format_.expand_to_rows(state.weights[name]), DTYPES[float])
            same = format_.are_equal(entry.read(), expected)
        else:
            same = isinstance(entry, TensorPlace) and _same_float(
                entry, checkpoint, state, name, float
            )
        if not same:
            raise LedgerError(
                f"{name} reads back from {folder.name} with other values than the compressed "
                "state has",
                where="lower: state -> folder",
                accepted="equality",
            )
    for name, value in format_.collect_cache_scales(state).items():
        entry = stored.get(name)
        if not isinstance(entry, TensorPlace) or not torch.equal(
            read_entry(entry), value.to(DTYPES[float])
        ):
            raise LedgerError(
                f"{name} of the KV cache reads back with another scale",
                where="lower: state -> folder",
                accepted="equality",
            )
    assert checkpoint_read is not None
    for module, covered in checkpoint_read.ranges.items():
        ours = state.ranges[input_name(module)]
        if state.activations == "float8 tensor":
            same = covered.float8_scale == ours.float8_scale
        elif state.activations == "float4 group":
            same = covered.float4_global_scale == ours.float4_global_scale
        else:
            same = (covered.scale, covered.zero_point) == (ours.scale, ours.zero_point)
        if not same:
            raise LedgerError(
                f"{module}:input reads back with another static range",
                where="lower: state -> folder",
                accepted="equality",
            )


def _same_float(
    entry: TensorPlace, checkpoint: Checkpoint, state: CompressedState, name: str, float: FloatType
) -> bool:
    """Test that an entry of the folder holds the float value of the parameter `name`, rounded."""
    is_float = name in state.weights and name == format_.find_embedding(checkpoint)
    value = (
        state.weights[name].dequantize()
        if is_float
        else format_.read_float_value(checkpoint, state, name)
    )
    if value.is_floating_point():
        value = value.to(DTYPES[float])
    return torch.equal(read_entry(entry), value)


def _as_stored(q: QTensor, dtype: torch.dtype) -> QTensor:
    return replace(q, scale=q.scale.to(dtype).float())


def estimate(section: CompressedTensorsTarget, shapes: Shapes) -> Estimate:
    """Estimate memory from one tensor at a time, and disk as if every weight stayed float, with one
    shard twice while it is assembled."""
    width = 4 if section.float == "fp32" else 2
    sizes = [width * prod(shape) for shape in shapes.values()]
    return Estimate(
        memory=(250 << 20) + 6 * max(sizes, default=0),
        disk=sum(sizes) + min(sum(sizes), format_.SHARD),
        seconds=1 + sum(sizes) / 60e6,
    )
