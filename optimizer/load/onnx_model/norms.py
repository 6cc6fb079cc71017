"""Find norms whose output only linear layers read, so that smoothing folds factors into them.

The last operators of a norm multiply by constants of channels, and may add some:

    LayerNormalization(x, weight, bias)
    Add(Mul(x, weight), bias)            a norm of several operators, as before opset 17
    Mul(x, weight)                       a norm of root mean squares
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from optimizer.load.onnx_model.draft import Draft, Operator
from optimizer.model.graph.record import LINEAR

WEIGHT, BIAS = ".weight", ".bias"


@dataclass(frozen=True)
class Norm:
    """Constants of a norm, and the linear layers that read its output.

    weight, bias: initializers of (channels,); "" without a bias
    readers: initializers of the layers' weights
    """

    weight: str
    bias: str
    readers: tuple[str, ...]

    @property
    def name(self) -> str:
        """Path of a module with these parameters, by the initializers' names; "" where they name
        none."""
        path = self.weight.removesuffix(WEIGHT)
        return path if self.weight == path + WEIGHT and self.bias in ("", path + BIAS) else ""


def find(draft: Draft) -> list[Norm]:
    """Find the norms of a graph whose linear layers are marked as modules."""
    readers = draft.readers()
    makers = {name: node for node in draft.nodes for name in node.outputs}
    norms = []
    for tensor, users in readers.items():
        own = tensor in makers and tensor not in draft.outputs
        if not own or not all(n.op == LINEAR and n.module for n in users):
            continue
        weight, bias = _constants(draft, makers[tensor], makers, readers)
        widths = {draft.constants[n.module].shape[1] for n in users}
        values = [draft.constants[name] for name in (weight, bias) if name]
        if values and all(v.ndim == 1 and {len(v)} == widths for v in values):
            norms.append(Norm(weight, bias, tuple(dict.fromkeys(n.module for n in users))))
    return norms


def _constants(
    draft: Draft,
    node: Operator,
    makers: Mapping[str, Operator],
    readers: Mapping[str, list[Operator]],
) -> tuple[str, str]:
    """Return (weight, bias) of the norm that ends with a node, "" for none. Both are read there
    alone."""

    def constant(of: Operator) -> tuple[str, str]:
        """(the only constant of an operator of two inputs, its other input)."""
        named = [n for n in of.inputs if n in draft.constants and len(readers[n]) == 1]
        others = [n for n in of.inputs if n not in draft.constants]
        return (named[0], others[0]) if len(named) == len(others) == 1 else ("", "")

    if node.domain:
        return "", ""
    if node.op == "LayerNormalization":
        weight, bias = (*node.inputs[1:3], "")[:2]
        alone = all(n in draft.constants and len(readers[n]) == 1 for n in (weight, bias) if n)
        return (weight, bias) if alone and node.attributes.get("axis", -1) == -1 else ("", "")
    bias = ""
    if node.op == "Add":
        bias, before = constant(node)
        product = makers.get(before)
        if not bias or product is None or product.op != "Mul" or product.domain:
            return "", ""
        if len(readers[before]) != 1 or before in draft.outputs:
            return "", ""
        node = product
    if node.op != "Mul":
        return "", ""
    weight, _ = constant(node)
    return (weight, bias) if weight else ("", "")
