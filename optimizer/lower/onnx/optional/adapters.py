"""Let a run of a decoder change its linear modules by a LoRA adapter.

    y = module(x) + (x A) B         A (in, rank), B (rank, out)

A and B are initializers of rank 0 that a run may override (harness/runtimes/ort/adapters.py). A run
without an adapter adds zeros: its values are those of the module alone. The nodes belong to no
module, so the ledger judges the modules alone, and each adapter end to end (validate/adapters.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from optimizer.export.scopes import MODULE, module_of
from optimizer.foundation.errors import OptimizeError
from optimizer.harness.contract import adapter_file
from optimizer.harness.runtimes.ort.adapters import A, B, read
from optimizer.lower.onnx import cut
from optimizer.lower.onnx.examine import add_initializer

Widths = Mapping[str, tuple[int, int]]
"""{module: (number of its inputs, of its outputs)}."""


def read_widths(source: Path) -> Widths:
    """Read the widths of the modules that LoRA adapters change; {} without adapters.

    source: folder of the load stage, which may hold adapters
    """
    files = sorted(source.glob(adapter_file("*")))
    shapes = {name: array.shape for file in files for name, array in read(file).items()}
    modules = [name.removesuffix(A) for name in shapes if name.endswith(A)]
    return {m: (shapes[f"{m}{A}"][0], shapes[f"{m}{B}"][1]) for m in modules}


def add(model: ir.Model, adapted: Widths, linear: Collection[str]) -> None:
    """Add A and B to each adapted module in place; call it after every fusion.

    adapted: widths of the adapted modules, from read_widths
    linear: names of all linear modules
    Raises OptimizeError for a module without a product in the graph.
    """
    products = [
        n
        for n in model.graph
        if n.op_type in cut.PRODUCTS and cut.is_of(n, linear) and cut.has_weight(n)
    ]
    if missing := sorted(adapted.keys() - set(map(module_of, products))):
        raise OptimizeError(
            f"an adapter changes {missing[0]}, which has no product in the graph",
            where="model.adapters",
            fix="Merge the adapter (model.adapters: [...]), or remove it.",
        )
    outputs = {product: cut.find_leaving(product) for product in products}
    inputs = {p: cut.find_entering(p, linear, set(outputs.values())) for p in products}
    for product in products:
        if module_of(product) in adapted:
            _add(model.graph, module_of(product), adapted, inputs[product], outputs[product])


def _add(graph: ir.Graph, module: str, adapted: Widths, x: ir.Value, y: ir.Value) -> None:
    """Add the products with a module's LoRA matrices, between its output `y` and the readers of
    `y`.

    x: input of the module
    """
    width, columns = adapted[module]
    rank = f"{module}.rank"
    first = _matrix(graph, f"{module}{A}", (width, 0), (width, rank))
    second = _matrix(graph, f"{module}{B}", (0, columns), (rank, columns))
    readers, last = list(y.uses()), y.producer()
    assert last is not None
    down = _node("MatMul", [x, first], f"{module}{A}")
    up = _node("MatMul", [down.outputs[0], second], f"{module}{B}")
    total = _node("Add", [y, up.outputs[0]], f"{module}.adapted")
    total.outputs[0].type, total.outputs[0].shape = y.type, y.shape
    graph.insert_after(last, [down, up, total])
    for node, index in readers:
        node.replace_input_with(index, total.outputs[0])


def _matrix(
    graph: ir.Graph, name: str, shape: tuple[int, int], axes: tuple[str | int, ...]
) -> ir.Value:
    """Return an initializer of `shape`, a LoRA matrix in the lowered graph that a run may override,
    one for all uses of a module.

    axes: axes of the matrix that a run gives. The name of the rank is the module's own, because
        ONNX Runtime reuses the memory of axes with one name, and a run may give some modules only
    """
    if name in graph.initializers:
        return graph.initializers[name]
    value = add_initializer(graph, name, np.zeros(shape, np.float32))
    value.shape = ir.Shape(axes)
    graph.inputs.append(value)
    return value


def _node(operator: str, inputs: Sequence[ir.Value], name: str) -> ir.Node:
    """Make a node of a LoRA adapter's products, which belongs to no module, for the graph that is
    lowered."""
    named = f"{name}/{operator}"
    node = ir.node(operator, list(inputs), name=named, metadata_props={MODULE: ""})
    node.outputs[0].name = f"{named}:0"
    return node
