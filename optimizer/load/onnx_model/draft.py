"""A graph while it is brought into the layout of model/graph/record.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import AttributeProto, numpy_helper

from optimizer.model.graph.record import REFERENCE, named_constants

Array = NDArray[Any]
Shape = tuple[int | None, ...]
"""Sizes of axes; None where one is not known without a run."""


@dataclass
class Operator:
    """Node of the graph of an ONNX file that is loaded, which load's passes may change."""

    op: str
    name: str
    inputs: list[str]
    outputs: list[str]
    attributes: dict[str, Any] = field(default_factory=dict)
    domain: str = ""
    module: str = ""
    bias: str = ""  # initializer that its module adds
    proto: Any = None


@dataclass
class Draft:
    """Graph of an ONNX file that the passes of load change in place.
    constants: initializers and folded values by name
    shapes: shape of each tensor that has one without a run
    """

    inputs: list[str]
    outputs: list[str]
    nodes: list[Operator]
    constants: dict[str, Array]
    shapes: dict[str, Shape]
    opset: int

    def readers(self) -> dict[str, list[Operator]]:
        """Return {tensor of the loaded ONNX file: nodes that read it}, a node once per input."""
        by_name: dict[str, list[Operator]] = {}
        for node in self.nodes:
            for name in node.inputs:
                by_name.setdefault(name, []).append(node)
        return by_name

    def alone(self, name: str, readers: Mapping[str, list[Operator]]) -> Operator | None:
        """The only reader of a tensor in the loaded ONNX file; None where there are others, or it
        is an output."""
        users = readers.get(name, [])
        return users[0] if len(users) == 1 and name not in self.outputs else None

    def fresh(self, name: str) -> str:
        """Return `name`, changed until no tensor of the loaded ONNX file has the name."""
        taken = {*self.inputs, *self.constants, *(n for node in self.nodes for n in node.outputs)}
        while name in taken:
            name += "_"
        return name

    def rename(self, old: str, new: str) -> None:
        """Make every reader of the tensor `old` in the loaded ONNX file read `new` instead."""
        for node in self.nodes:
            node.inputs = [new if n == old else n for n in node.inputs]

    def constant_inputs(self, node: Operator) -> list[Array | None] | None:
        """Values of the inputs of a node in the loaded ONNX file; None where one is not
        constant."""
        if any(n and n not in self.constants for n in node.inputs):
            return None
        return [self.constants[n] if n else None for n in node.inputs]

    def remove_unread(self) -> None:
        """Remove nodes and constants of the loaded ONNX file that reach no output."""
        needed = set(self.outputs)
        kept: list[Operator] = []
        for node in reversed(self.nodes):
            if needed & set(node.outputs):
                kept.append(node)
                needed |= {*node.inputs, node.bias, node.module}
                needed |= named_constants(node.attributes)
        self.nodes = kept[::-1]
        self.constants = {n: a for n, a in self.constants.items() if n in needed}


def of_proto(model: onnx.ModelProto, arrays: Mapping[str, Array], opset: int) -> Draft:
    """Begin to load an ONNX file: make the draft of `model`, whose initializers are `arrays`.
    Constant nodes become constants."""
    graph, constants = model.graph, dict(arrays)
    nodes: list[Operator] = []
    names = _unique([n.name or next(filter(None, n.output), n.op_type) for n in graph.node])
    for name, proto in zip(names, graph.node, strict=True):
        node = Operator(
            proto.op_type,
            name,
            list(proto.input),
            list(proto.output),
            domain="" if proto.domain == "ai.onnx" else proto.domain,
            proto=proto,
        )
        for attribute in proto.attribute:
            node.attributes[attribute.name] = _read(attribute, node.name, constants)
        if node.op == "Constant" and not node.domain:
            constants[node.outputs[0]] = _constant(node, constants)
        else:
            nodes.append(node)
    inputs = [i.name for i in graph.input if i.name not in arrays]
    shapes = shapes_of((*graph.value_info, *graph.input, *graph.output))
    return Draft(inputs, [o.name for o in graph.output], nodes, constants, shapes, opset)


def _unique(names: Sequence[str]) -> list[str]:
    """Return the names in a loaded ONNX file, with a number appended to each repeated one."""
    taken = set(names)
    seen: set[str] = set()
    unique = []
    for name in names:
        new, count = name, 1
        while new in seen or (new != name and new in taken):
            new, count = f"{name}_{count}", count + 1
        seen.add(new)
        unique.append(new)
    return unique


def _read(attribute: Any, node: str, constants: dict[str, Array]) -> Any:
    """Return the value of an attribute in a loaded ONNX file; for a tensor, which goes to
    `constants`, a reference to it."""
    value = onnx.helper.get_attribute_value(attribute)
    if attribute.type == AttributeProto.TENSOR:
        key = f"{node}/{attribute.name}"
        constants[key] = numpy_helper.to_array(value)
        return f"{REFERENCE}{key}"
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if attribute.type in (AttributeProto.INTS, AttributeProto.FLOATS):
        return list(value)
    if attribute.type == AttributeProto.STRINGS:
        return [v.decode("utf-8", "replace") for v in value]
    return value


def _constant(node: Operator, constants: dict[str, Array]) -> Array:
    ((kind, value),) = node.attributes.items()
    if kind == "value":
        return constants.pop(value.removeprefix(REFERENCE))
    dtype = np.float32 if kind.startswith("value_float") else np.int64
    return np.asarray(value, dtype)


def shapes_of(values: Iterable[Any]) -> dict[str, Shape]:
    """Return {tensor: shape} of those ValueInfoProtos of the loaded ONNX file that have one."""
    return {
        v.name: tuple(
            d.dim_value if d.HasField("dim_value") else None for d in v.type.tensor_type.shape.dim
        )
        for v in values
        if v.type.tensor_type.HasField("shape")
    }
