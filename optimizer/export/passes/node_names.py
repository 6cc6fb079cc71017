"""Name nodes and values "<module>/<operator>", other initializers "constant_<n>".

The names depend on the graph alone, so two exports give the same bytes. Node metadata keeps only
"module". The shapes of inner values are dropped: some are stale by now, and without them ONNX
Runtime does not merge residual adds into its SkipLayerNormalization, which is slower than the two
apart (measured, ONNX Runtime 1.31).
"""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from optimizer.export.scopes import MODULE, module_of


def is_alive(model: ir.Model) -> bool:
    """Return True if every node of the exported graph has an output that is read, or is an output
    of the graph; a dead node would use up a number in a name."""
    return all(any(v.uses() or v.is_graph_output() for v in n.outputs) for n in model.graph)


def name_nodes(model: ir.Model, parameters: Collection[str]) -> None:
    """Rename all nodes of the exported graph, and all initializers but `parameters`, which have
    their names already, so that equal models give equal files."""
    graph = model.graph
    fixed = {*graph.inputs, *graph.outputs, *graph.initializers.values()}
    counts: dict[str, int] = {}
    constants = {v: i for i, v in enumerate(_constants(graph, parameters))}
    for value, i in constants.items():
        value.name = f"constant_{i}"
    for node in graph:
        module = module_of(node)
        base = f"{module}/{node.op_type}" if module else node.op_type
        seen = counts[base] = counts.get(base, -1) + 1
        node.name = f"{base}_{seen}" if seen else base
        node.metadata_props.clear()
        node.metadata_props[MODULE] = module
        for i, value in enumerate(node.outputs):
            if value not in fixed:
                value.name = f"{node.name}:{i}"
                value.shape = value.type = None
            value.metadata_props.clear()
    for value in fixed:
        value.metadata_props.clear()
    graph.metadata_props.clear()
    model.metadata_props.clear()
    graph.name, graph.doc_string, model.doc_string = "main", None, None


def _constants(graph: ir.Graph, parameters: Collection[str]) -> list[ir.Value]:
    """List the exported graph's initializers not in `parameters`, in the order in which nodes first
    use them."""
    used = [v for node in graph for v in node.inputs if v is not None and v.is_initializer()]
    return [v for v in dict.fromkeys(used) if v.name not in parameters]


def is_named(model: ir.Model) -> bool:
    """Test that an exported graph's node names differ and node metadata is the module alone."""
    nodes = list(model.graph)
    single = len({node.name for node in nodes}) == len(nodes)
    return single and all(list(node.metadata_props) == [MODULE] for node in nodes)
