"""Split a graph into parts that run one after another, so that compression holds one of them at a
time.

The first part begins with the tensor that the first linear layer or convolution reads, or a
residual before it. A further part begins where only one of the tensors computed from that one is
still needed, so that all paths lead through it. Tensors that do not depend on it (masks, sizes) are
computed once, before the parts, and any part may read them. `starts` chooses beginnings such that
the weights of a part outweigh the tensor that it passes on; `split` derives the parts from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from optimizer.model.graph.record import BODY, CONV, LINEAR, Graph, Node

FLOAT_BYTES = 4
SIZES = ("Shape", "Size")
"""Operators that read no values."""


@dataclass(frozen=True)
class GraphPart:
    """Operators of a model that is an ONNX graph which are computed together.

    nodes: their indices, in the order in which they run
    reads: names of tensors that come from outside; a part's first one comes from the part before
    gives: names of tensors that are read outside; a part gives one
    paths: names of its modules, and of parameters outside modules
    """

    nodes: tuple[int, ...]
    reads: tuple[str, ...]
    gives: tuple[str, ...]
    paths: tuple[str, ...]


def starts(graph: Graph, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Choose the nodes at which a model's ONNX graph is divided into parts after the first; return
    their indices.

    sizes: {float32 tensor: bytes of one row}
    """
    inside, (places, last) = _inside(graph), _lives(graph)
    closed, live = _closed(graph), {*_entering(graph)} & {*last}
    chosen: list[int] = []
    weight, candidate = 0, 0
    counted: set[str] = set()
    for i in inside:
        node = graph.nodes[i]
        live = {name for name in live if last[name] >= i}
        (size, *more) = [sizes.get(name, weight + 1) for name in live] or [weight + 1]
        if weight and i not in closed and not more and size <= weight:
            candidate = i
        if _multiplies(node):
            if candidate:
                chosen.append(candidate)
                weight, candidate = 0, 0
            if node.module not in counted:
                counted.add(node.module)
                weight += FLOAT_BYTES * prod(graph.parameters[f"{node.module}.weight"])
        live |= {name for name in node.outputs if last.get(name, -1) > places[name]}
    return tuple(chosen)


def split(graph: Graph) -> tuple[GraphPart, tuple[GraphPart, ...]]:
    """Split a model's ONNX graph; return (the nodes that are computed before the parts, the
    parts)."""
    inside = _inside(graph)
    before = sorted({*range(len(graph.nodes))} - {*inside})
    outer = {name for i in before for name in graph.nodes[i].outputs} | set(graph.inputs)
    entering = _entering(graph)  # several parts may read it
    groups: list[list[int]] = [[]]
    for i in inside:
        if i in graph.starts:
            groups.append([])
        groups[-1].append(i)
    parts: list[GraphPart] = []
    for group in reversed(groups):
        gives = parts[-1].reads[:1] if parts else _answer(graph, group)
        reads = _reads(graph, group, gives)
        carried = [name for name in reads if name not in outer or name in entering]
        ordered = tuple(dict.fromkeys([*carried, *reads]))
        parts.append(GraphPart(tuple(group), ordered, gives, _paths(graph, group)))
    needed = dict.fromkeys(name for part in parts for name in part.reads if name in outer)
    first = GraphPart(tuple(before), tuple(graph.inputs), tuple(needed), _paths(graph, before))
    return first, tuple(parts[::-1])


def _multiplies(node: Node) -> bool:
    return bool(node.module) and node.op in (LINEAR, CONV)


def _entering(graph: Graph) -> tuple[str, ...]:
    """Return the name of the tensor at which the first part of a model's ONNX graph begins, as a
    tuple of at most one.

    That is the input of the first module. Where a residual connection passes that module, its
    start is returned instead: the earliest tensor from which the input is computed and which is
    read again behind the module. () if the input is a weight or a constant.
    """
    places, _ = _lives(graph)
    names = next((n.inputs[:1] for n in graph.nodes if _multiplies(n)), ())
    origins = {n for n in names if n not in graph.constants and n not in graph.parameters}
    for node in reversed(graph.nodes[: min((places.get(n, -1) + 1 for n in origins), default=0)]):
        if origins & set(node.outputs) and node.op not in SIZES:
            origins |= {name for name in node.inputs if name in places}
    behind = _dependent(graph, set())
    again = {name for i in behind for name in graph.nodes[i].inputs if name in origins}
    return tuple(sorted(again or origins, key=lambda name: places.get(name, -1))[:1])


def _inside(graph: Graph) -> list[int]:
    """Return the indices of the nodes that belong to parts: linear layers and convolutions, and all
    nodes computed from one of them or from the tensor at which the first part begins."""
    return _dependent(graph, {*_entering(graph)})


def _dependent(graph: Graph, entering: set[str]) -> list[int]:
    """Return the indices, in a model's ONNX graph, of the linear layers and convolutions, and of
    all nodes whose values are computed from one of them or from the tensors in `entering`."""
    dependent = {*entering}
    indices = []
    for i, node in enumerate(graph.nodes):
        read = dependent & set(node.inputs)
        if _multiplies(node) or (read - entering if node.op in SIZES else read):
            dependent |= {name for name in node.outputs if name}
            indices.append(i)
    return indices


def _lives(graph: Graph) -> tuple[dict[str, int], dict[str, int]]:
    """Return of a model's ONNX graph ({tensor: index of the node that makes it}, {tensor: index of
    the last node that reads it})."""
    places = {name: i for i, node in enumerate(graph.nodes) for name in node.outputs}
    last = {name: i for i, node in enumerate(graph.nodes) for name in node.inputs}
    return places, last


def _closed(graph: Graph) -> set[int]:
    """Return the indices of nodes at which a part of a model's ONNX graph must not begin: between
    two uses of one module, and between an identity that quantizes a tensor and the last module
    before it."""
    first: dict[str, int] = {}
    behind: dict[str, int] = {}  # {tensor: index of the last module before it}
    closed: set[int] = set()
    for i, node in enumerate(graph.nodes):
        if _multiplies(node):
            closed |= set(range(first.setdefault(node.module, i) + 1, i + 1))
            start = i
        else:
            start = max((behind[n] for n in node.inputs if n in behind), default=-1)
            closed |= set(range(start + 1, i + 1)) if node.module else set()
        if start >= 0:
            behind |= dict.fromkeys(node.outputs, start)
    return closed


def _reads(graph: Graph, group: Sequence[int], gives: Sequence[str]) -> list[str]:
    """Return the names of tensors from outside that a part's nodes read, and of those in `gives`
    that the part passes on unchanged."""
    own = {name for i in group for name in graph.nodes[i].outputs}
    read = [name for i in group for name in graph.nodes[i].inputs if name]
    outside = (n for n in (*gives, *read) if n not in own and n not in graph.constants)
    return list(dict.fromkeys(n for n in outside if n not in graph.parameters))


def _answer(graph: Graph, group: Sequence[int]) -> tuple[str, ...]:
    """Return, as a tuple of at most one, the name of the tensor that the last part of a model's
    ONNX graph gives: the graph's first output among its tensors, else the output of its last
    module."""
    own = {name for i in group for name in graph.nodes[i].outputs}
    outputs = [name for name in graph.outputs if name in own]
    modules = [graph.nodes[i].outputs[0] for i in group if _multiplies(graph.nodes[i])]
    return tuple((outputs or modules[::-1])[:1])


def _paths(graph: Graph, group: Iterable[int]) -> tuple[str, ...]:
    nodes = [graph.nodes[i] for i in group]
    modules = [n.module for n in nodes if n.module]
    return tuple(
        dict.fromkeys([*modules, *(p for n in nodes for p in n.inputs if p.startswith(f"{BODY}."))])
    )
