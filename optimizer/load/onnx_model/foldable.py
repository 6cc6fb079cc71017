"""Find where factors of channels can be folded into a graph: norms whose output only linear layers
read (smoothing), and layers with nothing between them that such factors would not pass
(equalization).

The last operators of a norm multiply by constants of channels, and may add some:

    LayerNormalization(x, weight, bias)
    Add(Mul(x, weight), bias)            a norm of several operators, as before opset 17
    Mul(x, weight)                       a norm of root mean squares
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from optimizer.load.onnx_model.draft import Draft, Operator
from optimizer.model.graph.record import CONV, LINEAR

HOMOGENEOUS = ("Relu", "LeakyRelu", "MaxPool", "AveragePool", "GlobalAveragePool", "Identity")
"""Operators f of each channel alone with f(s x) = s f(x) for s > 0."""


Place = tuple[Operator, int]
"""Operator, and the index of one of its inputs."""


@dataclass(frozen=True)
class Norm:
    """Constants of a norm in a loaded ONNX file, and the linear layers that read its output.

    weight, bias: places where constants of (channels,) are read; None without a bias
    readers: initializers of the layers' weights
    """

    weight: Place
    bias: Place | None
    readers: tuple[str, ...]

    @property
    def constants(self) -> dict[str, Place]:
        """{"weight" or "bias": place where the norm reads it}."""
        return {"weight": self.weight} | ({} if self.bias is None else {"bias": self.bias})


def find_pairs(draft: Draft) -> list[tuple[str, tuple[str, ...]]]:
    """Find layers of a loaded ONNX file whose output only convolutions read, of a convolution, or
    only linear layers, of a linear layer, behind operators of HOMOGENEOUS: (weight of the layer,
    weights of the readers)."""
    readers = draft.readers()
    weights = [n.module for n in draft.nodes if n.module]
    pairs = []
    for node in draft.nodes:
        if node.op not in (CONV, LINEAR) or not node.module:
            continue
        tensors, ends = list(node.outputs), list[Operator]()
        for tensor in tensors:
            users = readers.get(tensor, [])
            ends += [n for n in users if n.domain or n.op not in HOMOGENEOUS]
            tensors += [n.outputs[0] for n in users if not n.domain and n.op in HOMOGENEOUS]
        alike = all(n.op == node.op and n.module and not n.domain for n in ends)
        once = all(weights.count(n.module) == 1 for n in (node, *ends))
        if ends and alike and once and not {*tensors} & {*draft.outputs}:
            pairs.append((node.module, tuple(n.module for n in ends)))
    return pairs


def find_norms(draft: Draft) -> list[Norm]:
    """Find the norms of a loaded ONNX file whose linear layers are marked as modules. Norms may
    share a constant."""
    readers = draft.readers()
    makers = {name: node for node in draft.nodes for name in node.outputs}
    norms = []
    for tensor, maker in makers.items():
        places = _constants(draft, maker, makers, readers)
        if not places or tensor in draft.outputs:
            continue
        values = [draft.constants[node.inputs[at]] for node, at in places]
        width = len(values[0]) if values[0].ndim == 1 else 0
        users = _users(draft, tensor, width, readers)
        linear = all(n.op == LINEAR and n.module for n in users)
        widths = {draft.constants[n.module].shape[1] for n in users} if linear else {0}
        if users and widths == {width} and all(v.shape == (width,) for v in values):
            modules = tuple(dict.fromkeys(n.module for n in users))
            norms.append(Norm(places[0], places[1] if len(places) > 1 else None, modules))
    return norms


def _users(
    draft: Draft, tensor: str, width: int, readers: Mapping[str, list[Operator]]
) -> list[Operator]:
    """Return the operators of a loaded ONNX file that read a tensor, behind a Reshape that keeps
    its last axis."""
    users = []
    for node in readers.get(tensor, []):
        shape = draft.constants.get(node.inputs[1]) if node.op == "Reshape" else None
        if shape is None or shape.size == 0 or int(shape[-1]) != width:
            users.append(node)
        elif node.outputs[0] in draft.outputs:
            return []
        else:
            users += readers.get(node.outputs[0], [])
    return users


def _constants(
    draft: Draft,
    node: Operator,
    makers: Mapping[str, Operator],
    readers: Mapping[str, list[Operator]],
) -> list[Place]:
    """Return the places of (weight, bias) of the norm that ends with an operator of a loaded ONNX
    file; [] for none."""

    def constant(of: Operator) -> int | None:
        """Index of the only constant of an operator of two inputs."""
        named = [at for at, n in enumerate(of.inputs) if n in draft.constants]
        return named[0] if len(named) == 1 == len(of.inputs) - 1 else None

    if node.domain:
        return []
    if node.op == "LayerNormalization":
        last = node.attributes.get("axis", -1) == -1
        places = [(node, at) for at, n in enumerate(node.inputs) if at and n]
        fixed = all(n.inputs[at] in draft.constants for n, at in places)
        return places if last and fixed else []
    bias = constant(node) if node.op == "Add" else None
    product = node if bias is None else makers.get(node.inputs[1 - bias])
    if product is None or product.op != "Mul" or product.domain:
        return []
    between = product.outputs[0]
    if bias is not None and (len(readers[between]) != 1 or between in draft.outputs):
        return []
    weight = constant(product)
    if weight is None:
        return []
    return [(product, weight)] if bias is None else [(product, weight), (node, bias)]
