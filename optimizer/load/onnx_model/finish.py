"""Name the modules and parameters of a draft, and choose the outputs of convolutions to quantize.

A module has the name of its weight's initializer without ".weight", or that of its bias where the
exporter numbered the weight. A parameter is any other float initializer of more than one value.

ONNX Runtime runs a Conv in integers only where its output is quantized too. Where another operator
than a module reads that output, an identity marks the tensor (Summand in residual_blocks.py): the
output of the Conv, or of the Relu or Clip behind it. A Conv whose output the model returns stays
float. An Add of two such tensors and a MaxPool of one run in integers, too, where a module
quantizes the result anyway and an identity marks it for all other readers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from optimizer.load.onnx_model import foldable
from optimizer.load.onnx_model.draft import Array, Draft, Operator
from optimizer.load.onnx_model.passes import TIMES, TURNED, is_parameter
from optimizer.model.graph.module import Body
from optimizer.model.graph.record import BODY, CONV, LINEAR, Graph, Node, named_constants

INTEGERS = ("Add", "MaxPool")
"""Operators that ONNX Runtime computes in integers between quantized tensors."""
CLAMPS = ("Relu", "Clip")
"""Activations that ONNX Runtime computes inside a Conv, and inside an Add of integers."""
MARK, NORM = "output", "norm"
_EMPTY = Body(Graph((), (), 0, (), {}, Path()))
"""A module whose own attributes cannot be names of modules or parameters."""


@dataclass(frozen=True)
class Finished:
    """Nodes and values of a loaded ONNX file on which all of load's passes ran.

    modules: names of linear layers and convolutions that may be quantized, below BODY
    marks: (identity, convolution) below BODY
    left: {module: reason to leave it in float}
    norms: (path of a norm's weight and bias, linear layers that read it), below BODY
    equalized: (layer, layers that read it through operators that keep factors), below BODY
    """

    nodes: tuple[Node, ...]
    parameters: dict[str, Array]
    constants: dict[str, torch.Tensor]
    modules: tuple[str, ...]
    marks: tuple[tuple[str, str], ...]
    left: dict[str, str]
    norms: tuple[tuple[str, tuple[str, ...]], ...]
    equalized: tuple[tuple[str, tuple[str, ...]], ...]


class _Names:
    """Paths of a loaded ONNX file's modules and parameters in torch, each once."""

    def __init__(self) -> None:
        self.taken: set[str] = set()
        self.leaves: set[str] = set()
        self.modules: set[str] = set()

    def claim(self, name: str, *, leaf: bool) -> str:
        """Choose for a loaded ONNX file a path like `name`, below no parameter or module, which
        compression may replace, and above nothing. leaf: True for a parameter"""
        parts = [self._part(part) for part in name.split(".")]
        above = {".".join(parts[:i]) for i in range(1, len(parts))}
        path = "_".join(parts) if above & (self.leaves | self.modules) else ".".join(parts)
        while path in self.taken or any(other.startswith(f"{path}.") for other in self.taken):
            path += "_"
        self.taken.add(path)
        if leaf:
            self.leaves.add(path)
        return path

    def claim_module(self, name: str) -> str:
        """Choose for a loaded ONNX file the path of a module, whose weight and bias no other
        parameter can be."""
        path = self.claim(name, leaf=False)
        self.modules.add(path)
        own = {f"{path}.weight", f"{path}.bias"}
        self.taken |= own
        self.leaves |= own
        return path

    @staticmethod
    def _part(part: str) -> str:
        return f"{part}_" if not part or hasattr(_EMPTY, part) else part


def finish(draft: Draft) -> Finished:
    """Name modules and parameters of a loaded ONNX file's draft, on which all passes ran."""
    equalized = foldable.find_pairs(draft)
    marks, left = _mark(draft)
    before_linears = foldable.find_norms(draft)
    names, parameters = _Names(), dict[str, Array]()
    path_of = {
        weight: f"{BODY}.{names.claim_module(_module_name(weight, bias))}"
        for weight, bias in _weights(draft).items()
    }
    for node in draft.nodes:
        if node.op in (LINEAR, CONV) and node.module:
            path = path_of[node.module]
            parameters[f"{path}.weight"] = draft.constants[node.module]
            if node.bias:
                parameters[f"{path}.bias"] = draft.constants[node.bias]
            node.module = path
    values = {n: a for n, a in draft.constants.items() if is_parameter(a)}
    renamed: dict[str, str] = {}
    smooth, readers = [], draft.readers()

    def inside(weight: str) -> str:
        return path_of[weight].removeprefix(f"{BODY}.")

    for norm in before_linears:
        consumers = tuple(map(inside, norm.readers))
        path = names.claim_module(_norm_name(norm, readers) or f"{consumers[0]}_{NORM}")
        smooth.append((path, consumers))
        for part, (node, at) in norm.constants.items():
            parameters[f"{BODY}.{path}.{part}"] = values[node.inputs[at]]
            node.inputs[at] = f"{BODY}.{path}.{part}"
    for node in draft.nodes:
        for name in node.inputs:
            if name in values and name not in renamed:
                renamed[name] = f"{BODY}.{names.claim(name, leaf=True)}"
                parameters[renamed[name]] = values[name]
    read = {name for node in draft.nodes for name in node.inputs} | set(draft.outputs)
    read |= {name for node in draft.nodes for name in named_constants(node.attributes)}
    constants = {
        n: torch.from_numpy(np.array(a))
        for n, a in draft.constants.items()
        if n in read and n not in renamed
    }
    of_module = {n.outputs[0]: n.module for n in draft.nodes if n.module}
    for node, convolution in marks:
        beside = f"{of_module[convolution].removeprefix(f'{BODY}.')}_{MARK}"
        node.module = f"{BODY}.{names.claim(beside, leaf=False)}"
    nodes = tuple(_node(node, renamed) for node in draft.nodes)
    prefix = f"{BODY}."
    modules = dict.fromkeys(n.module for n in nodes if n.op in (LINEAR, CONV))
    floats = {of_module[tensor]: why for tensor, why in left.items()}
    return Finished(
        nodes,
        parameters,
        constants,
        tuple(m.removeprefix(prefix) for m in modules if m not in floats),
        tuple((n.module.removeprefix(prefix), of_module[c].removeprefix(prefix)) for n, c in marks),
        floats,
        tuple(smooth),
        tuple((inside(w), tuple(map(inside, readers))) for w, readers in equalized),
    )


def _weights(draft: Draft) -> dict[str, str]:
    """Return {weight of a module in a loaded ONNX file: its bias}, in order."""
    return {n.module: n.bias for n in draft.nodes if n.op in (LINEAR, CONV) and n.module}


def _module_name(weight: str, bias: str) -> str:
    plain, bias = weight.partition(TIMES)[0], bias.partition(TIMES)[0]
    while plain.endswith(TURNED):
        plain = plain.removesuffix(TURNED)
    if plain.endswith(".weight"):
        return plain.removesuffix(".weight")
    return bias.removesuffix(".bias") if bias.endswith(".bias") else plain


def _norm_name(norm: foldable.Norm, readers: Mapping[str, list[Operator]]) -> str:
    """Choose for a loaded ONNX file the path of a module with the norm's parameters, by the names
    of their initializers; "" where these have others, or another operator reads them too."""
    names = {part: node.inputs[at] for part, (node, at) in norm.constants.items()}
    path = names["weight"].removesuffix(".weight")
    alone = all(len(readers[name]) == 1 for name in names.values())
    fits = all(name == f"{path}.{part}" for part, name in names.items())
    return path if alone and fits else ""


def _node(node: Operator, renamed: dict[str, str]) -> Node:
    inputs = tuple(renamed.get(name, name) for name in node.inputs)
    return Node(
        node.op, node.name, inputs, tuple(node.outputs), node.attributes, node.domain, node.module
    )


def _mark(draft: Draft) -> tuple[list[tuple[Operator, str]], dict[str, str]]:
    """Mark in a loaded ONNX file the outputs of convolutions to quantize: ([(identity that was
    inserted, output of its convolution)], {output of a convolution that stays float: why})."""
    left: dict[str, str] = {}
    readers = draft.readers()
    ends: dict[str, str] = {}  # {tensor between integers: output of its convolution}
    order: dict[str, int] = {}
    for at, node in enumerate(draft.nodes):
        passes = node.op in INTEGERS and not node.domain and {*node.inputs} <= {*ends}
        if node.op != CONV and not passes:
            continue
        output = node.outputs[0]
        last = _clamped(draft, node, readers)
        tensor, users = last.outputs[0], readers.get(last.outputs[0], [])
        twice = any(n.inputs.count(tensor) > 1 for n in users)
        if node.op == CONV:
            order[output] = at
            if twice:
                left[output] = "an operator reads its output twice"
            if tensor in draft.outputs:
                left[output] = "the model returns its output, so that no integers follow"
            if output not in left:
                ends[tensor] = output
        elif not twice and tensor not in draft.outputs and any(map(_is_module, users)):
            ends[tensor] = max((ends[name] for name in node.inputs), key=order.__getitem__)
    marks = []
    for tensor, output in ends.items():
        floats = [n for n in readers.get(tensor, []) if not _is_module(n) or n.outputs[0] in left]
        if not floats:
            continue
        maker = next(n for n in draft.nodes if tensor in n.outputs)
        marked = draft.fresh(f"{tensor}/{MARK}")
        identity = Operator("Identity", f"{maker.name}/{MARK}", [tensor], [marked])
        for node in floats:
            node.inputs = [identity.outputs[0] if n == tensor else n for n in node.inputs]
        draft.nodes.insert(draft.nodes.index(maker) + 1, identity)
        marks.append((identity, output))
    return marks, left


def _clamped(draft: Draft, node: Operator, readers: dict[str, list[Operator]]) -> Operator:
    """The Relu or Clip behind a node of a loaded ONNX file, else the node."""
    behind = draft.alone(node.outputs[0], readers)
    clamps = behind is not None and behind.op in CLAMPS and not behind.domain
    return behind if clamps and behind is not None else node


def _is_module(node: Operator) -> bool:
    return node.op in (LINEAR, CONV)
