"""Export the checkpoint, with the state's replaced parameters, as a float ONNX graph.

Writes model.onnx (and model.onnx.data, see onnx_file.py) and names.json (see names.py). The model
is traced without its weights, which are streamed from the checkpoint into the file. The file is
then paired with the checkpoint by value (names.py) and compared with the torch model (check.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from optimizer.export import attention_operands, graph_file, names, onnx_file
from optimizer.export.check import (
    FLOAT_TYPES,
    LARGE,
    check,
    check_shapes,
    draw_inputs,
    list_vocabulary_sizes,
    longest_of,
)
from optimizer.export.interface import Interface, build_interface
from optimizer.export.onnx_from_torch import export
from optimizer.export.passes.clean import clean
from optimizer.export.passes.repeat import TRACED, are_alike, grow, shorten
from optimizer.export.reference import Arrays, lend, run_torch
from optimizer.export.weights import ROWS_OF, Values, fill_buffers, stand_in, untie
from optimizer.foundation import state as compressed_state
from optimizer.foundation.errors import RecipeError
from optimizer.foundation.process import machine_speed
from optimizer.foundation.progress import say
from optimizer.foundation.state import CompressedState, weight_name
from optimizer.model.architectures.architecture import find_family
from optimizer.model.architectures.family_record import Family
from optimizer.model.architectures.operands import select_operands
from optimizer.model.architectures.residual_blocks import Summand
from optimizer.model.checkpoint.checkpoint import Checkpoint, open_checkpoint
from optimizer.model.checkpoint.model import build_skeleton, is_linear
from optimizer.model.graph import drawn, record
from optimizer.model.graph.module import GraphModel
from optimizer.model.graph.needs import graph_of
from optimizer.recipe.schema import Export
from optimizer.store import Estimate, Shapes, Stage


def run(section: Export, source: Path, state: Path | None = None, *, out: Path) -> None:
    """Export the model: write the float graph and its names.

    source: folder of the load or reduce stage
    state: folder of the compress stage, for its `replaced` parameters
    Raises LedgerError when the graph and the torch model disagree, OptimizeError when a weight
    cannot be found in the graph.
    """
    contract = json.loads((source / "contract.json").read_text(encoding="utf-8"))
    checkpoint = open_checkpoint(source)
    compressed = CompressedState({}) if state is None else compressed_state.read(state)
    model = build_skeleton(checkpoint, contract["task"])
    if section.float != "fp32":
        check_half_precision(model)
    untie(model, compressed.replaced)
    fill_buffers(model, checkpoint.tensors, compressed.replaced)
    values = Values(model, checkpoint.tensors, compressed.replaced)
    architecture = find_family(checkpoint.config, contract["task"], checkpoint.folder)
    blocks = architecture.prefix(contract["task"]) + architecture.blocks
    repeated = None if architecture.uneven or architecture.crosses_blocks else blocks
    marks: graph_file.Marks = {}
    if record.is_graph(checkpoint.folder):
        shapes = {name: checkpoint.shape(name) for name in checkpoint.tensors}
        own, grown = record.read(checkpoint.folder, shapes), False
        graph, marks = graph_file.build_float_graph(own, values, contract)
    else:
        graph, grown = trace_float_graph(model, values, contract, section, repeated)
    onnx_file.save(graph, out / "model.onnx")
    written = onnx_file.load(out / "model.onnx")
    linear, tables = list_multiplied_modules(model, compressed), list_embeddings(model)
    paired = names.pair(written, values, linear, compressed.weights, values.first, tables)
    multiplied = select_operands(compressed)
    added = [n for n in compressed.summands if n not in multiplied]
    known = {n: _summand(n, architecture, model) for n in added if n not in marks}
    summands = names.find_residual_adds(written, paired.modules, known)
    summands |= {n: marks[n] for n in added if n in marks}
    operands = attention_operands.find(written, paired.modules, multiplied)
    paired = replace(paired, summands=summands, operands=operands)
    text = json.dumps(paired.as_dict(), indent=1, sort_keys=True)
    (out / "names.json").write_text(text, encoding="utf-8")
    lend(model, values)
    answer = partial(run_torch, model, contract)
    limits = list_vocabulary_sizes(checkpoint.config, contract)
    inputs = draw_batches(contract, limits, checkpoint)
    check(out / "model.onnx", contract, inputs, limits, section.float, answer, blocks, model, grown)


def draw_batches(
    contract: Mapping[str, Any], limits: Mapping[str, int], checkpoint: Checkpoint
) -> list[Arrays]:
    """Draw the batches on which the exported graph is compared with torch.

    limits: result of check.list_vocabulary_sizes
    """
    shapes = check_shapes(contract)
    if not record.is_graph(checkpoint.folder):
        return [draw_inputs(contract, limits, *shape) for shape in shapes]
    ports = drawn.of_contract(contract, checkpoint.config)
    return [drawn.draw(ports, rows, seed=rows) for rows, _ in shapes]


def check_half_precision(model: nn.Module) -> None:
    """Raise RecipeError for a model that cannot be exported in half precision: transformers keeps
    some of its modules in float32, or it is an ONNX file, which is float32."""
    if isinstance(model, GraphModel):
        raise RecipeError(
            "the graph of an ONNX file stays as it is, in float32",
            where="targets: float: fp16",
            accepted="fp32",
            fix="Write float: fp32 in the target.",
        )
    kept = sorted(getattr(model, "_keep_in_fp32_modules", None) or ())
    if kept:
        raise RecipeError(
            f"transformers keeps {', '.join(kept)} of {type(model).__name__} in float32, where "
            "fp16 overflows",
            where="targets: float: fp16",
            accepted="fp32",
            fix="Write float: fp32 in the target.",
        )


def trace_float_graph(
    model: nn.Module,
    values: Values,
    contract: Mapping[str, Any],
    section: Export,
    blocks: str | None = None,
) -> tuple[ir.Model, bool]:
    """Trace and clean the graph of a skeleton (a model without weights).

    Returns the graph, and True where its later blocks are copies of traced ones.
    values: weights, read when the graph is written
    blocks: name of the list of blocks, if equal ones may be traced once (passes/repeat.py)
    """
    float_type = FLOAT_TYPES[section.float]
    ports = build_interface(contract, float_type)
    count = len(list(model.get_submodule(blocks).children())) if blocks else 0
    repeats = count > TRACED and are_alike(model.get_submodule(blocks or ""))
    stand_in(model, getattr(torch, float_type))

    def trace(ports: Interface) -> ir.Model:
        graph = export(model, ports, longest(contract), section.opset)
        return clean(graph, values, values.first)

    if blocks and repeats:
        with shorten(model, blocks, TRACED):
            graph = trace(build_interface(contract, float_type, TRACED))
        if grow(graph, blocks, ports, count):
            return graph, True
        say(f"export: the graphs of {blocks} differ, so all {count} blocks are traced")
    return trace(ports), False


def longest(contract: Mapping[str, Any]) -> int:
    """Maximum tokens that the model takes; 1 for images."""
    cache = contract.get("generation")
    return int(cache["context"]) if cache is not None else longest_of(contract)


def list_linear_modules(model: nn.Module) -> list[str]:
    """List for names.json every nn.Linear by name; one that is held several times by its first
    name."""
    return [name for name, m in model.named_modules() if is_linear(m)]


def list_multiplied_modules(model: nn.Module, state: CompressedState) -> list[str]:
    """List the modules whose products the exported graph must have: all linear modules, and the
    convolutions that `state` quantizes."""
    filters = [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)]
    return [*list_linear_modules(model), *(n for n in filters if weight_name(n) in state.weights)]


def _summand(module: str, architecture: Family, model: nn.Module) -> tuple[str, Summand]:
    """Return (name of its block, its record) for the identity named `module`."""
    known = (s.module for s in architecture.summands if module.endswith(f".{s.module}"))
    block = module.removesuffix(f".{max(known, key=len)}")
    return block, architecture.summands_of(block, dict(model.named_modules()))[module]


def list_embeddings(model: nn.Module) -> list[str]:
    """List for names.json every nn.Embedding by name; one that is held several times by its first
    name."""
    return [name for name, m in model.named_modules() if isinstance(m, nn.Embedding)]


IMPORTED = 40e6  # turns of MachineSpeed.interpreted for imports of this stage (measured)
GRAPH_COPIES = 4  # of the weights of a graph: in torch, written, read, in a session
GRAPH_ROWS = (1, 3)  # of the batches on which a graph is checked (check_shapes)
TRACING = 130e6  # turns of MachineSpeed.interpreted (measured)
WRITTEN = 220  # bytes moved per byte of the file: converted, transposed, written, compared
CHECKED = 900  # the same, in correct runs of a small model


def estimate(section: Export, shapes: Shapes) -> Estimate:
    """Estimate memory and time of the stage.

    Memory is that of rows of the largest weight and its copy in ONNX Runtime, and of a small model,
    which is checked whole. Time is that of tracing, nearly independent of depth
    (docs/decisions/0018), of writing the weights, and of checking a small model whole.
    """
    sizes, speed = [4 * prod(s) for s in shapes.values()], machine_speed.measure()
    size, largest = sum(sizes), max(sizes, default=0)
    if graph := graph_of(shapes):
        live = max(GRAPH_ROWS) * max(part.live for part in graph.parts)
        return Estimate(
            memory=graph.libraries + GRAPH_COPIES * size + graph.rounded.memory + live,
            disk=size,
            seconds=speed.interpret(IMPORTED)
            + speed.move(WRITTEN * size)
            + sum(map(graph.rounded.seconds, GRAPH_ROWS)),
        )
    whole = 2 * size if size < LARGE else 0
    moved = size * (WRITTEN + (CHECKED if whole else 0))
    return Estimate(
        memory=(650 << 20) + 3 * min(largest, 4 * ROWS_OF) + largest + whole,
        disk=size // 2 if section.float == "fp16" else size,
        seconds=speed.interpret(TRACING) + speed.move(moved),
    )


STAGE = Stage(
    "export",
    3,
    run,
    packages=("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "onnxruntime"),
    estimate=estimate,
)
