"""Follow the edges of a graph, and evaluate a part of it on examples.

Subgraphs are evaluated with onnx's reference rather than recognised by their nodes, which change
with every version of the exporter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator

from optimizer.harness.inputs.kv_cache import is_past, position_ids

Array = NDArray[Any]


def find_maker(value: ir.Value | None, op: str) -> ir.Node | None:
    """Find the node that computes `value` in the graph that is lowered, where it is an `op`; else
    None."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op else None


def find_only_user(value: ir.Value) -> ir.Node | None:
    """Find the node that alone uses `value` in the graph that is lowered, Shapes not counted; None
    for none or several."""
    users = [n for n, _ in value.uses() if n.op_type != "Shape"]
    return users[0] if len(users) == 1 else None


def read_constant(value: ir.Value | None) -> list[Any] | None:
    """Read the elements of an initializer of the graph that is lowered, flattened; None for any
    other value."""
    if value is None or value.const_value is None or not value.is_initializer():
        return None
    elements: list[Any] = value.const_value.numpy().reshape(-1).tolist()
    return elements


def add_initializer(graph: ir.Graph, name: str, array: Array) -> ir.Value:
    """Add an initializer to the graph that is lowered."""
    tensor = ir.tensor(np.asarray(array, order="C"), name=name)
    value = ir.val(name, tensor.dtype, tensor.shape, const_value=tensor)
    graph.register_initializer(value)
    return value


def take_over(old: ir.Value, new: ir.Value) -> None:
    """Let `new` take the place of the value `old` in the graph that is lowered: its name, its type
    and its readers."""
    name, new.type, new.shape = old.name, old.type, old.shape
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    old.name, new.name = None, name


@dataclass(frozen=True)
class DecoderExamples:
    """Example inputs of a decoder's ONNX graph whose KV cache has `past` columns, on which a
    lowering evaluates parts of the graph before it rewrites them.
    padding: attention_mask [batch, past + sequence]
    positions: [batch, sequence], by default counted from the padding
    """

    model: ir.Model
    padding: Array
    past: int
    positions: Array | None = None

    @property
    def causal(self) -> Array:
        """Return the causal mask, bool [batch, 1, sequence, total]: True for real columns up to
        the token's own."""
        total = self.padding.shape[1]
        until = np.arange(self.past, total)[:, None] >= np.arange(total)[None]
        seen: Array = until[None, None] & self.padding[:, None, None].astype(bool)
        return seen

    def arrays(self) -> dict[str, Array]:
        """Return {input of the decoder's ONNX graph: array}; the KV cache is zeros that take no
        memory."""
        batch, total = self.padding.shape
        arrays = {
            "input_ids": np.zeros((batch, total - self.past), np.int64),
            "attention_mask": self.padding.astype(np.int64),
            "position_ids": np.asarray(
                position_ids(self.padding, total - self.past)
                if self.positions is None
                else self.positions,
                np.int64,
            ),
        }
        for value in self.model.graph.inputs:
            if is_past(str(value.name)) and value.shape is not None:
                sizes = [s if isinstance(s, int) else 1 for s in value.shape]
                sizes[0], sizes[2] = batch, self.past
                kind = (value.dtype or ir.DataType.FLOAT).numpy()
                arrays[str(value.name)] = np.broadcast_to(kind.type(0), sizes)
        return arrays


def evaluate(model: ir.Model, value: ir.Value, inputs: DecoderExamples) -> Array:
    """Evaluate `value` of the graph that is lowered on these inputs; only operators that it depends
    on run."""
    names = [str(v.name) for v in model.graph.inputs]
    piece = ir.convenience.extract(model.graph, names, [str(value.name)])
    for v in piece.outputs:
        v.type = v.type or ir.TensorType(ir.DataType.FLOAT)
    part = ir.Model(piece, ir_version=model.ir_version)
    evaluator = ReferenceEvaluator(ir.to_proto(part))
    arrays = inputs.arrays()
    result: Array = evaluator.run(None, {n: arrays[n] for n in evaluator.input_names})[0]
    return result
