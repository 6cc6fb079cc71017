"""Read the epsilon of every norm of a graph, written as either of two patterns.

one operator    LayerNormalization, GroupNormalization, RMSNormalization and ONNX Runtime's own:
                its attribute
spelled out     Sqrt(mean + epsilon), the mean over an axis
"""

from __future__ import annotations

import onnx_ir as ir

from optimizer.export.scopes import module_of
from optimizer.lower.onnx.examine import find_maker, read_constant

DEFAULTS = {
    "LayerNormalization": 1e-5,
    "GroupNormalization": 1e-5,
    "RMSNormalization": 1e-5,
    "SimplifiedLayerNormalization": 1e-5,
    "SkipLayerNormalization": 1e-12,
    "SkipSimplifiedLayerNormalization": 1e-12,
}
"""Value for an operator without the attribute, by its specification."""


def read_epsilons(graph: ir.Graph) -> dict[str, tuple[float, ...]]:
    """Read the epsilons of norms in an exported or lowered graph: {module: epsilon of each norm in
    it, in graph order}."""
    by_module: dict[str, tuple[float, ...]] = {}
    for node in graph:
        epsilon = _attribute(node) if node.op_type in DEFAULTS else _spelled_out(node)
        if epsilon is not None:
            by_module[module_of(node)] = (*by_module.get(module_of(node), ()), epsilon)
    return by_module


def _attribute(node: ir.Node) -> float:
    attribute = node.attributes.get("epsilon")
    return DEFAULTS[node.op_type] if attribute is None else float(attribute.as_float())


def _spelled_out(node: ir.Node) -> float | None:
    """Return the epsilon of a norm that the graph writes as Sqrt(mean + epsilon), or None."""
    shifted = find_maker(node.inputs[0], "Add") if node.op_type == "Sqrt" else None
    if shifted is None:
        return None
    for mean, added in (shifted.inputs, reversed(shifted.inputs)):
        number = read_constant(added)
        if find_maker(mean, "ReduceMean") is not None and number is not None and len(number) == 1:
            return float(number[0])
    return None
