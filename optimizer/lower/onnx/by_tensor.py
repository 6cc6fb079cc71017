"""Write variants of a graph by which the error of each operator is measured.

list_float_tensors   names of the float32 tensors that operators compute
write_through        the graph, with such tensors as further outputs
write_alone          the graph cut at such tensors: each is an input for its readers, and the value
                     that its operator computes is an output, so that an operator's error reaches
                     no other operator
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import onnx_ir as ir

from optimizer.export import onnx_file
from optimizer.export.scopes import module_of
from optimizer.lower.onnx.graph_source import open_graph

OWN = "/own"


def _values(model: ir.Model, names: Collection[str]) -> list[ir.Value]:
    return [v for node in model.graph for v in node.outputs if v.name in names]


def list_float_tensors(path: Path) -> list[str]:
    """List the float32 tensors of a known rank that operators of a lowered graph compute, in graph
    order."""
    values = [v for node in open_graph(path).model.graph for v in node.outputs]
    known = [v for v in values if v.name and v.shape is not None]
    return [str(v.name) for v in known if v.dtype == ir.DataType.FLOAT]


def write_through(path: Path, tensors: Collection[str], out: Path) -> None:
    """Write the lowered graph to `out` with `tensors` as further outputs, so that a run returns
    them."""
    model = open_graph(path).model
    own = set(model.graph.outputs)
    model.graph.outputs.extend(v for v in _values(model, tensors) if v not in own)
    onnx_file.save(model, out)


def write_alone(path: Path, tensors: Mapping[str, int], out: Path) -> dict[str, str]:
    """Write the lowered graph cut at `tensors` to `out`, to run each operator alone. Returns
    {tensor: name of its output}.

    tensors: {tensor: number of axes}
    """
    model = open_graph(path).model
    results = _values(model, tensors)
    ending = OWN
    taken = {v.name for node in model.graph for v in (*node.inputs, *node.outputs) if v is not None}
    while any(f"{name}{ending}" in taken for name in tensors):
        ending += OWN
    for value in results:
        shape = ir.Shape([None] * tensors[str(value.name)])
        read = ir.val(str(value.name), ir.DataType.FLOAT, shape)
        value.name = f"{value.name}{ending}"
        for node, index in tuple(value.uses()):
            node.replace_input_with(index, read)
        model.graph.inputs.append(read)
    model.graph.outputs[:] = results
    onnx_file.save(model, out)
    return {name: f"{name}{ending}" for name in tensors}


def find_behind_modules(
    path: Path, tensors: Collection[str], modules: Collection[str]
) -> dict[str, bool]:
    """Tell which tensors of a lowered graph an operator of `modules` contributes to since the
    previous tensors.

    Returns {tensor: True where such an operator lies between it and the nearest of `tensors` before
    it}.
    """
    behind = {}
    for value in _values(open_graph(path).model, tensors):
        pending, seen = [value.producer()], set[ir.Node]()
        while pending:
            node = pending.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            read = [v for v in node.inputs if v is not None and v.name not in tensors]
            pending += [v.producer() for v in read]
        behind[str(value.name)] = any(module_of(n) in modules for n in seen)
    return behind
