"""Run a decoder's exported graph one block at a time, for models too large to run at once.

Each piece is cut from the written file: from the inputs of model and block to the block's output
and its part of the KV cache; the last piece computes the logits. Shared values without weights
(mask, angles) are computed again in every piece. A runtime holds the weights of one piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from optimizer.export import onnx_file
from optimizer.export.passes.repeat import Numbers
from optimizer.export.reference import Arrays
from optimizer.export.scopes import module_of
from optimizer.foundation.errors import OptimizeError
from optimizer.harness.inputs.kv_cache import PARTS, is_past, past_name, present_name
from optimizer.harness.runtimes.ort.run import OrtRunner

PAST = 4
"""Tokens of a batch that torch prefills; the graph starts from that KV cache."""


def take_first_tokens(batch: Arrays) -> Arrays:
    """Make the first batch of the check of an exported decoder: the first PAST tokens (columns)."""
    return {name: array[:, :PAST] for name, array in batch.items()}


def take_later_tokens(batch: Arrays, before: Arrays, layers: int, float_type: str) -> Arrays:
    """Make the second batch of the check of an exported decoder: the tokens after PAST, and as
    their past the KV cache in `before`.

    before: outputs of a run on take_first_tokens(batch)
    layers: number of blocks
    float_type: type of the KV cache
    """
    rest = {n: a if n == "attention_mask" else a[:, PAST:] for n, a in batch.items()}
    for i in range(layers):
        for part in PARTS:
            rest[past_name(i, part)] = before[present_name(i, part)].astype(float_type)
    return rest


def run_blocks(
    path: Path, blocks: str, contract: Mapping[str, Any], batch: Arrays, run: int | None = None
) -> Arrays:
    """Run the exported graph at `path`, some blocks at a time, on a batch with a past. Returns its
    outputs, KV cache included.

    blocks: name of the list of blocks
    run: number of blocks to run, from the first, before the last piece; None for all. The others
        are only cut, which proves that each continues from the one before it.
    Raises OptimizeError where the graph cannot be cut between two blocks.
    """
    layers = int(contract["generation"]["layers"])
    model = onnx_file.load(path)
    ends = [str(end.name) for end in _ends(model, blocks, layers)]
    answers: Arrays = {}
    hidden: Any = None
    for k in range(layers + 1):
        last = k == layers
        past = [past_name(i, part) for i in {0, k % layers} for part in PARTS]  # 0 gives the length
        outputs = ["logits"] if last else [ends[k], *(present_name(k, part) for part in PARTS)]
        entering = {} if k == 0 else {ends[k - 1]: hidden}
        piece = _cut(
            model, [i["name"] for i in contract["inputs"]] + past + list(entering), outputs
        )
        if not last and run is not None and k >= run:
            continue
        results = _run(piece, path, model.ir_version, {**batch, **entering})
        hidden = None if last else results.pop(ends[k])
        answers.update(results)
    return answers


def _ends(model: ir.Model, blocks: str, layers: int) -> list[ir.Value]:
    """Find each block's output hidden state in the exported graph: of the values used outside the
    block, the one computed from input_ids. (Masks and angles depend on positions only.)"""
    numbers = Numbers(blocks)
    tokens = next(v for v in model.graph.inputs if v.name == "input_ids")
    float_type = next(v.type for v in model.graph.inputs if is_past(str(v.name)))
    moved = {tokens}
    leaving: dict[int, list[ir.Value]] = {}
    for node in model.graph:
        if node.op_type == "Shape" or not moved.intersection(v for v in node.inputs if v):
            continue
        moved.update(node.outputs)
        here = numbers.of(module_of(node))
        for value in node.outputs:
            users = {numbers.of(module_of(user)) for user, _ in value.uses()}
            if here is not None and users - {here}:
                leaving.setdefault(here, []).append(value)
    if sorted(leaving) != list(range(layers)) or any(len(v) != 1 for v in leaving.values()):
        raise OptimizeError(f"{blocks} of the exported graph do not follow one another")
    for (end,) in leaving.values():
        end.type, end.shape = float_type, ir.Shape(["batch", "sequence", "width"])
    return [leaving[k][0] for k in range(layers)]


def _cut(model: ir.Model, inputs: list[str], outputs: list[str]) -> ir.Graph:
    """Cut out the part of the exported graph between these tensors. Raises OptimizeError where
    others enter."""
    try:
        graph = ir.convenience.extract(model.graph, inputs, outputs)
    except ValueError as e:
        raise OptimizeError(f"{outputs[0]} of the exported graph is not of one block: {e}") from e
    used = [v for v in graph.inputs if v.uses()]
    graph.inputs.clear()
    graph.inputs.extend(used)
    return graph


def _run(graph: ir.Graph, path: Path, ir_version: int, arrays: Arrays) -> Arrays:
    """Run a piece of the exported graph at `path` on `arrays`; return {output: array}. Its weights
    stay in the graph's file."""
    piece = path.with_name("piece.onnx")
    try:
        ir.save(ir.Model(graph, ir_version=ir_version), piece)
        with OrtRunner(piece, device="cpu", mapped=True) as runner:
            return runner.infer({str(v.name): arrays[str(v.name)] for v in graph.inputs})
    finally:
        piece.unlink(missing_ok=True)
