"""Compute a sentence embedding in the graph, so that one vector per text leaves the GPU.

    answer = pooling of last_hidden_state over attention_mask, several joined; then normalized;
             its first `dimensions` numbers                  float32 [batch, numbers]

The function is that of harness/tasks/embeddings/sentence_embedding.py; the ledger's hop `harness`
compares the two within float32's rounding. The hidden states stay an output of the graph, but a
session copies them to the host only on request: for 32 texts of 256 tokens the copy took 3.3 ms
and the forward pass 2.0 ms (H200, benchmarks/results/gpu_h200.md).

Left to the host, with the reason:
 1. Dense and other layers behind the pooling
 2. a prompt that is left out of the pooling, whose tokens only the host knows
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir

from optimizer.export.scopes import MODULE
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.tasks.embeddings.sentence_embedding import SMALLEST_NORM
from optimizer.lower.onnx.examine import add_initializer

MASK = "attention_mask"
LAST = np.array([-1], np.int64)


def add(model: ir.Model, contract: Contract) -> str:
    """Add the pooled embedding as an output of `model`, in place, for a task that answers with it.
    Returns the reason where it is left to the host, else ""."""
    task = tasks.look_up(contract)
    if not task.answer_output:
        return ""
    if contract.vectors.layers:
        return "layers behind the pooling are computed on the host"
    if not contract.vectors.include_prompt:
        return "the prompt's tokens, which are not pooled, are known to the host only"
    _Pooling(model, task.output).add(contract, task.answer_output)
    return ""


class _Pooling:
    """Appends the operators of a sentence embedding's pooling to the graph that is lowered, one
    method per kind.
    hidden: hidden states in float32, [batch, sequence, width]
    real: True where attention_mask is 1, [batch, sequence, 1]
    mask: the same in float32
    count: number of such tokens, at least 1, float32 [batch, 1]
    """

    def __init__(self, model: ir.Model, output: str) -> None:
        self.graph = model.graph
        inputs = {str(v.name): v for v in self.graph.inputs}
        outputs = {str(v.name): v for v in self.graph.outputs}
        to_float = int(ir.DataType.FLOAT)
        self.hidden = self._insert("Cast", [outputs[output]], to=to_float)
        last = self._fixed("last_axis", LAST)
        wide = self._insert("Unsqueeze", [inputs[MASK], last])
        self.mask = self._insert("Cast", [wide], to=to_float)
        self.real = self._insert("Cast", [wide], to=int(ir.DataType.BOOL))
        self.count = self._insert("Max", [self._sum_tokens(self.mask), self._number("one", 1)])

    def add(self, contract: Contract, name: str) -> None:
        """Add the output `name` to the lowered graph: pooled, then normalized and shortened as the
        contract says."""
        parts = [POOL[pooling](self) for pooling in contract.poolings]
        vector = parts[0] if len(parts) == 1 else self._insert("Concat", parts, axis=1)
        if contract.normalize:
            squared = self._insert("Mul", [vector, vector])
            last = self._fixed("last_axis", LAST)
            norm = self._insert("Sqrt", [self._insert("ReduceSum", [squared, last], keepdims=1)])
            safe = self._insert("Max", [norm, self._number("smallest_norm", SMALLEST_NORM)])
            vector = self._insert("Div", [vector, safe])
        if contract.vectors.dimensions is not None:
            ends = (0, contract.vectors.dimensions, 1)
            start, end, axis = (self._fixed(f"slice_{i}", np.array([i], np.int64)) for i in ends)
            vector = self._insert("Slice", [vector, start, end, axis])
        vector.name = name
        vector.type = ir.TensorType(ir.DataType.FLOAT)
        vector.shape = ir.Shape(["batch", _width(contract)])
        self.graph.outputs.append(vector)

    def mean(self) -> ir.Value:
        return self._insert("Div", [self._sum(self.hidden), self.count])

    def mean_sqrt(self) -> ir.Value:
        return self._insert("Div", [self._sum(self.hidden), self._insert("Sqrt", [self.count])])

    def weighted_mean(self) -> ir.Value:
        weights = self._insert("Mul", [self.mask, self._place()])
        total = self._insert("Max", [self._sum_tokens(weights), self._number("one", 1)])
        return self._insert("Div", [self._sum(self._insert("Mul", [self.hidden, weights])), total])

    def max(self) -> ir.Value:
        lowest = self._number("lowest", -np.inf)
        real = self._insert("Where", [self.real, self.hidden, lowest])
        turned = self._insert("Transpose", [real], perm=(0, 2, 1))
        highest = self._insert("GlobalMaxPool", [turned])  # CUDA has no ReduceMax of opset 20
        return self._insert("Squeeze", [highest, self._fixed("last_axis", LAST)])

    def first(self) -> ir.Value:
        return self._at(self._insert("ArgMax", [self.mask], axis=1, keepdims=0))

    def last(self) -> ir.Value:
        places = self._insert("Mul", [self.mask, self._place()])
        return self._at(self._insert("ArgMax", [places], axis=1, keepdims=0))

    def _at(self, index: ir.Value) -> ir.Value:
        """Insert into the lowered graph a Gather of the hidden state of one token of each text, and
        return its output [batch, width]. index: position of the token, int64 [batch, 1]"""
        return self._insert("GatherND", [self.hidden, index], batch_dims=1)

    def _place(self) -> ir.Value:
        """Insert into the lowered graph the number of each token from 1. It is summed from the
        mask's shape, since a Range is computed on the CPU."""
        ones = self._insert(
            "Add",
            [self._insert("Mul", [self.mask, self._number("zero", 0)]), self._number("one", 1)],
        )
        return self._insert("CumSum", [ones, self._fixed("tokens", np.array(1, np.int64))])

    def _sum(self, values: ir.Value) -> ir.Value:
        """Insert into the lowered graph the sum of hidden states over the real tokens of each text.
        A padding token's state may be infinite, so it is selected away."""
        real = self._insert("Where", [self.real, values, self._number("zero", 0)])
        return self._sum_tokens(real)

    def _sum_tokens(self, values: ir.Value) -> ir.Value:
        axis = self._fixed("token_axis", np.array([1], np.int64))
        return self._insert("ReduceSum", [values, axis], keepdims=0)

    def _number(self, name: str, value: float) -> ir.Value:
        return self._fixed(name, np.array(value, np.float32))

    def _fixed(self, name: str, array: np.ndarray) -> ir.Value:
        name = f"answer/{name}"
        known = self.graph.initializers.get(name)
        return known or add_initializer(self.graph, name, array)

    def _insert(self, op: str, inputs: list[ir.Value], /, **attributes: Any) -> ir.Value:
        """Append a node to the lowered graph outside every module, so that cuts exclude it; return
        its output."""
        name = f"answer/{op}_{len(self.graph)}"
        node = ir.node(op, inputs, attributes, name=name, metadata_props={MODULE: ""})
        node.outputs[0].name = name
        self.graph.append(node)
        return node.outputs[0]


def _width(contract: Contract) -> int:
    (output,) = contract.outputs
    return contract.vectors.width(int(output.axes[-1]) * len(contract.poolings))


POOL: Mapping[str, Callable[[_Pooling], ir.Value]] = {
    "mean": _Pooling.mean,
    "cls": _Pooling.first,
    "max": _Pooling.max,
    "mean_sqrt_len_tokens": _Pooling.mean_sqrt,
    "weightedmean": _Pooling.weighted_mean,
    "lasttoken": _Pooling.last,
}
"""Pooling by name of harness/contract.py: POOLINGS."""
