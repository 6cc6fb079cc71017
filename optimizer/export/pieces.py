"""Run a decoder's exported graph one block at a time, for models too large to run at once.

Each piece is cut from the written file: from the inputs of model and block to the block's output
and its part of the KV cache; the last piece computes the logits. Shared values without weights
(mask, angles) are computed again in every piece. A runtime holds the weights of one piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
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


def first_tokens(batch: Arrays) -> Arrays:
    """Take the first PAST tokens of a batch."""
    return {name: array[:, :PAST] for name, array in batch.items()}


def later_tokens(batch: Arrays, before: Arrays, layers: int, float_type: str) -> Arrays:
    """Take the tokens after PAST, with the KV cache of `before`: outputs for the first tokens."""
    rest = {n: a if n == "attention_mask" else a[:, PAST:] for n, a in batch.items()}
    for i in range(layers):
        for part in PARTS:
            rest[past_name(i, part)] = before[present_name(i, part)].astype(float_type)
    return rest


def run_blocks(path: Path, blocks: str, contract: Mapping[str, Any], batch: Arrays) -> Arrays:
    """Run the graph at `path` on a batch with a past. Returns its outputs, KV cache included.

    blocks: name of the list of blocks
    Raises OptimizeError where the graph cannot be cut between two blocks.
    """
    layers = int(contract["generation"]["layers"])
    model = onnx_file.load(path)
    ends = _ends(model, blocks, layers)
    answers: Arrays = {}
    carried: Arrays = {}
    for k in range(layers + 1):
        last = k == layers
        past = [past_name(i, part) for i in {0, k % layers} for part in PARTS]  # 0 gives the length
        outputs = [] if last else [present_name(k, part) for part in PARTS]
        outputs.append("logits" if last else str(ends[k].name))
        inputs = [i["name"] for i in contract["inputs"]] + past + list(carried)
        results = _run(model, path, inputs, outputs, {**batch, **carried})
        carried = {} if last else {str(ends[k].name): results.pop(str(ends[k].name))}
        answers.update(results)
    return answers


def _ends(model: ir.Model, blocks: str, layers: int) -> list[ir.Value]:
    """The hidden state that each block hands to the next: of the values used outside the block, the
    one computed from input_ids. (Masks and angles depend on positions only.)"""
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


def _run(
    model: ir.Model, path: Path, inputs: list[str], outputs: list[str], arrays: Arrays
) -> Arrays:
    """Run the piece of the graph between these tensors on `arrays`; return {output: array}."""
    graph = ir.convenience.extract(model.graph, inputs, outputs)
    used = [v for v in graph.inputs if v.uses()]
    graph.inputs.clear()
    graph.inputs.extend(used)
    with TemporaryDirectory(dir=path.parent) as folder:
        piece = Path(folder) / "piece.onnx"
        onnx_file.save(ir.Model(graph, ir_version=model.ir_version), piece, limit=0)
        for weight in graph.initializers.values():
            if isinstance(weight.const_value, ir.ExternalTensor):
                weight.const_value.release()
        with OrtRunner(piece, device="cpu") as runner:
            return runner.infer({str(v.name): arrays[str(v.name)] for v in used})
