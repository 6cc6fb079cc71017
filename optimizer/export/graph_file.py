"""Write the graph of an ONNX checkpoint with the checkpoint's tensors, under the same names.

A Linear becomes MatMul and Add, a Conv2d a Conv; its operators carry the module's name in their
metadata, as those of a traced model do (scopes.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from torch import Tensor

from optimizer.export.interface import build_interface
from optimizer.export.names import OperatorInput
from optimizer.export.scopes import MODULE
from optimizer.export.weights import StoredInitializer, Values
from optimizer.model.graph.record import CONV, LINEAR, Graph, Node, resolve

IR_VERSION = 10
Marks = dict[str, tuple[OperatorInput, ...]]


class _GraphWriter:
    """Builder of an ONNX graph from a `Graph`, node by node; see build_float_graph."""

    def __init__(self, graph: Graph, values: Values, contract: Mapping[str, Any]) -> None:
        self.graph, self.values = graph, values
        ports = build_interface(contract)
        self.tensors: dict[str, ir.Value] = {
            p.name: ir.val(p.name, ir.DataType[_type(p.dtype)], ir.Shape(p.axes))
            for p in ports.inputs
        }
        self.inputs = list(self.tensors.values())
        self.initializers: dict[str, ir.Value] = {}
        self.nodes: list[ir.Node] = []
        self.same: dict[str, str] = {}  # {output of a mark: its input}
        self.mark_of: dict[str, str] = {}  # {output of a mark: its name}
        self.uses: dict[str, list[OperatorInput]] = {}  # {mark: operators that read its output}
        self.ports = ports
        self.taken = {*graph.inputs, *graph.constants, *(n.name for n in graph.nodes)}
        self.taken |= {n for node in graph.nodes for n in node.outputs}

    def parameter(self, name: str, transposed: bool = False) -> ir.Value:
        """Return the initializer that holds a parameter of the torch model in the graph; made on
        first use."""
        if name not in self.initializers:
            shape = self.graph.parameters[name]
            stored = StoredInitializer(self.values, name, ir.DataType.FLOAT, shape, transposed)
            self._constant(name, stored)
        return self.initializers[name]

    def _constant(self, name: str, tensor: Any) -> ir.Value:
        value = ir.val(name, tensor.dtype, ir.Shape(tensor.shape), const_value=tensor)
        self.initializers[name] = value
        return value

    def value(self, name: str) -> ir.Value | None:
        """Return the tensor, parameter or constant `name` of the ONNX graph that is built; None for
        "", an absent input."""
        name = self.same.get(name, name)
        if not name:
            return None
        if name in self.tensors:
            return self.tensors[name]
        if name in self.graph.parameters:
            return self.parameter(name)
        if name not in self.initializers:
            self._constant(name, ir.tensor(self.graph.constants[name].numpy(), name=name))
        return self.initializers[name]

    def fresh(self, name: str) -> str:
        """Return a free name for a tensor or operator of the float graph that is built: `name`,
        with underscores appended until no tensor or operator has the name."""
        while name in self.taken:
            name += "_"
        return name

    def add(
        self,
        node: Node,
        op: str,
        inputs: list[ir.Value | None],
        outputs: list[str],
        attributes: Mapping[str, Any],
        name: str,
    ) -> list[ir.Value]:
        """Append to the ONNX graph an operator that carries the module of `node`; return its
        outputs."""
        results = [self._result(n) for n in outputs]
        self.nodes.append(
            ir.node(
                op,
                inputs,
                {k: v for k, v in attributes.items() if v != []},
                domain=node.domain,
                outputs=results,
                name=name,
                metadata_props={MODULE: node.module},
            )
        )
        self.tensors |= dict(zip(outputs, results, strict=True))
        return results

    def _result(self, name: str) -> ir.Value:
        if name not in self.graph.custom_types:
            return ir.val(name)
        kind, axes = self.graph.custom_types[name]
        return ir.val(name, ir.DataType.from_numpy(np.dtype(kind)), ir.Shape([None] * axes))

    def write(self, node: Node) -> None:
        """Append to the ONNX graph the operators of a node, and record which marked tensors its
        first one reads."""
        count = len(self.nodes)
        self._write(node)
        for mark in dict.fromkeys(self.mark_of[n] for n in node.inputs if n in self.mark_of):
            tensor = next(self.same[n] for n in node.inputs if self.mark_of.get(n) == mark)
            self.uses[mark].append(OperatorInput(str(self.nodes[count].name), tensor))

    def _write(self, node: Node) -> None:
        """Append to the ONNX graph a Linear as MatMul and Add, a convolution as Conv, others as
        they are; a mark (an identity that names a tensor) is left out, its readers read its
        input."""
        x = self.value(node.inputs[0]) if node.inputs else None
        biased = f"{node.module}.bias" in self.graph.parameters
        if node.op == LINEAR:
            weight = self.parameter(f"{node.module}.weight", transposed=True)
            (out,) = node.outputs
            inner = self.fresh(f"{out}/product") if biased else out
            (product,) = self.add(
                node, "MatMul", [x, weight], [inner], {}, self.fresh(f"{node.name}/MatMul")
            )
            if biased:
                bias = self.parameter(f"{node.module}.bias")
                name = self.fresh(f"{node.name}/Add")
                self.add(node, "Add", [product, bias], [out], {}, name)
        elif node.op == CONV:
            parts = ["weight", "bias"] if biased else ["weight"]
            operands = [x, *(self.parameter(f"{node.module}.{part}") for part in parts)]
            self.add(node, "Conv", operands, list(node.outputs), node.attributes, node.name)
        elif node.module:  # a mark
            self.same[node.outputs[0]] = node.inputs[0]
            self.mark_of[node.outputs[0]], self.uses[node.module] = node.module, []
        else:
            attributes = {
                k: ir.tensor(v.numpy()) if isinstance(v, Tensor) else v
                for k, v in resolve(node.attributes, self.graph.constants).items()
            }
            inputs = [self.value(n) for n in node.inputs]
            outputs = [n or f"{node.name}/unread_{i}" for i, n in enumerate(node.outputs)]
            self.add(node, node.op, inputs, outputs, attributes, node.name)

    def model(self) -> ir.Model:
        """Return the model of all nodes, with the contract's inputs and outputs."""
        outputs = []
        for port in self.ports.outputs:
            value = self.tensors[port.name]
            value.type = ir.TensorType(ir.DataType[_type(port.dtype)])
            value.shape = ir.Shape(port.axes)
            outputs.append(value)
        domains = {n.domain: 1 for n in self.nodes if n.domain}
        graph = ir.Graph(
            self.inputs,
            outputs,
            nodes=self.nodes,
            initializers=list(self.initializers.values()),
            opset_imports={"": self.graph.opset, **domains},
            name="main",
        )
        return ir.Model(graph, ir_version=IR_VERSION)


def _type(dtype: str) -> str:
    return {"float32": "FLOAT", "int64": "INT64", "int32": "INT32"}[dtype]


def build_float_graph(
    graph: Graph, values: Values, contract: Mapping[str, Any]
) -> tuple[ir.Model, Marks]:
    """Build the ONNX model of an ONNX checkpoint's graph.

    Returns the model, and {mark: operators that read the marked tensor}.

    values: {parameter: its value}, read when the model is written
    """
    writer = _GraphWriter(graph, values, contract)
    for node in graph.nodes:
        writer.write(node)
    return writer.model(), {mark: tuple(uses) for mark, uses in writer.uses.items()}
