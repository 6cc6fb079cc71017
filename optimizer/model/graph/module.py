"""Torch module of an ONNX graph, in which each linear layer and 2-D convolution is a module of its
own. Code that observes or replaces modules of a transformers model therefore works on it too.

    model = GraphModel(graph)      parameters on the meta device
    model(**inputs) -> {output: tensor}

The whole graph runs as one module; compression runs its parts (parts.py) one by one.

An operator that torch does not compute here runs in ONNX Runtime, without a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from optimizer.foundation.conv_geometry import NO_EXTRA, PaddedConvolution
from optimizer.harness.errors import HarnessError
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.model.graph.operators import OPERATORS
from optimizer.model.graph.parts import GraphPart, split
from optimizer.model.graph.record import BODY, CONV, LINEAR, PARTS, Graph, Node, resolve

FAILURES = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of torch on an operator whose attributes or inputs it does not take."""


class NodeError(Exception):
    """Raised for an ONNX operator that could not be computed in torch.

    node: the operator
    why: reason, for the message
    arguments: its inputs; None for an input that the graph leaves out
    """

    def __init__(self, node: Node, why: str, arguments: Sequence[Any]) -> None:
        super().__init__(f"node {node.name!r} ({node.op}): {why}")
        self.node, self.why, self.arguments = node, why, arguments


class Body(nn.Module):
    """Torch module of all operators of a model that is an ONNX graph: the graph's inputs, in order
    -> tuple of its outputs.

    observe: function called after each operator with (operator, inputs, results); None: no call
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        self.observe: Callable[[Node, list[Any], tuple[Tensor, ...]], None] | None = None
        self.constants = dict(graph.constants)
        self.last = _last_uses(graph, range(len(graph.nodes)), graph.outputs)
        self.weights = {n: n.removeprefix(f"{BODY}.") for n in graph.parameters}
        modules = [n for n in graph.nodes if n.module]
        for node in sorted(modules, key=lambda n: n.module.count(".")):
            _place(self, node.module.removeprefix(f"{BODY}."), _module(node, graph))
        owned = {f"{n.module}.{part}" for n in modules for part in ("weight", "bias")}
        for name, shape in graph.parameters.items():
            if name not in owned:
                path, _, attribute = self.weights[name].rpartition(".")
                empty = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
                _holder(self, path).register_parameter(attribute, empty)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Compute the graph's outputs. Raises NodeError for an operator that fails."""
        values = dict(zip(self.graph.inputs, inputs, strict=True))
        return self.run(range(len(self.graph.nodes)), values, self.last, self.graph.outputs)

    def run(
        self,
        nodes: Iterable[int],
        values: dict[str, Tensor],
        last: Mapping[int, Sequence[str]],
        outputs: Sequence[str],
    ) -> tuple[Tensor, ...]:
        """Compute some of the graph's operators in torch and return the tensors named in `outputs`.

        nodes: indices of the operators, in order
        values: {name: tensor} that the operators read; results are added, and dropped after their
            last use
        last: {index of an operator: names of tensors to drop after it}, from _last_uses
        outputs: names of the tensors to return

        Raises NodeError for an operator that fails.
        """
        for i in nodes:
            node = self.graph.nodes[i]
            arguments = [self._value(name, values) if name else None for name in node.inputs]
            try:
                results = self._run(node, arguments)
            except NodeError:
                raise
            except FAILURES as e:
                why = str(e).split("\n")[0][:200] or "its attributes are not covered in torch"
                raise NodeError(node, why, arguments) from e
            if self.observe is not None:
                self.observe(node, arguments, results)
            values.update((n, r) for n, r in zip(node.outputs, results, strict=False) if n)
            for name in last.get(i, ()):
                values.pop(name, None)
        return tuple(self._value(name, values) for name in outputs)

    def _value(self, name: str, values: Mapping[str, Tensor]) -> Tensor:
        if name in values:
            return values[name]
        if name in self.constants:
            return self.constants[name]
        return self.get_parameter(self.weights[name])

    def _run(self, node: Node, arguments: list[Any]) -> tuple[Tensor, ...]:
        if node.module:
            module = self.get_submodule(node.module.removeprefix(f"{BODY}."))
            return (module(arguments[0]),)
        if node.file:
            return in_onnx_runtime(node, self.graph.folder / node.file, arguments)
        if node.domain or node.op not in OPERATORS:
            raise NodeError(node, "it is not among the operators in torch", arguments)
        results = self.in_torch(node, arguments)
        if any(node.outputs[len(results) :]):
            why = f"output {node.outputs[len(results)]!r} is not computed"
            raise NodeError(node, why, arguments)
        return results

    def in_torch(self, node: Node, arguments: list[Any]) -> tuple[Tensor, ...]:
        """Compute one of the graph's operators, of the table OPERATORS, in torch; return its
        results."""
        result = OPERATORS[node.op](arguments, resolve(node.attributes, self.constants))
        return result if isinstance(result, tuple) else (result,)


class PartModule(nn.Module):
    """Torch module of some nodes of an ONNX graph: their input tensors -> their output tensors.

    body: module of the whole graph, which keeps the weights under its own names
    """

    def __init__(self, body: Body, part: GraphPart) -> None:
        super().__init__()
        self.__dict__["body"] = body  # not as a module inside this one
        self.part = part
        self.last = _last_uses(body.graph, part.nodes, part.gives)

    def forward(self, *read: Tensor) -> tuple[Tensor, ...]:
        """Compute a part of the graph from the tensors `part.reads`; return the tensors
        `part.gives`. Raises NodeError for an operator that fails."""
        values = dict(zip(self.part.reads, read, strict=True))
        results: tuple[Tensor, ...] = self.__dict__["body"].run(
            self.part.nodes, values, self.last, self.part.gives
        )
        return results


class GraphModel(nn.Module):
    """Model of an ONNX graph, called like a transformers model.

    before: operators that are computed before the parts; the parts are in the ModuleList named
        PARTS
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.inputs, self.outputs = graph.inputs, graph.outputs
        body = Body(graph)
        self.add_module(BODY, body)
        before, parts = split(graph)
        self.before = PartModule(body, before)
        self.add_module(PARTS, nn.ModuleList(PartModule(body, part) for part in parts))

    def forward(self, return_dict: bool = True, **inputs: Tensor) -> dict[str, Tensor]:
        """Compute with torch {output of the ONNX graph: tensor}. return_dict: ignored; accepted
        because callers of transformers pass it."""
        del return_dict
        body: Any = self.get_submodule(BODY)
        results = body(*(inputs[name] for name in self.inputs))
        return dict(zip(self.outputs, results, strict=True))

    def arguments(self, inputs: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """Compute, from the model's inputs, the tensors that do not depend on any part, and yield
        for each part those that it reads. The first part gets all of its inputs; the result of the
        part before, which is every other part's first input, is left to the caller."""
        gives = self.before.part.gives
        values = dict(zip(gives, self.before(*(inputs[n] for n in self.inputs)), strict=True))
        parts: Any = self.get_submodule(PARTS)
        for i, module in enumerate(parts):
            yield tuple(values[name] for name in module.part.reads[min(i, 1) :])


def _last_uses(
    graph: Graph, nodes: Iterable[int], outputs: Sequence[str]
) -> dict[int, tuple[str, ...]]:
    """Return {index of an operator in the model's graph: names of the tensors that no later one of
    `nodes` reads}. Tensors in `outputs` are never listed."""
    each = [(i, graph.nodes[i]) for i in nodes]
    last = {name: i for i, node in each for name in (*node.outputs, *node.inputs)}
    by_node: dict[int, tuple[str, ...]] = {}
    for name, i in last.items():
        if name and name not in outputs:
            by_node[i] = (*by_node.get(i, ()), name)
    return by_node


def _module(node: Node, graph: Graph) -> nn.Module:
    """Build the torch module of an ONNX graph's node, with parameters on the meta device: a linear
    layer, a convolution, or an identity that quantizes a tensor."""
    if node.op not in (LINEAR, CONV):
        return nn.Identity()
    shape = graph.parameters[f"{node.module}.weight"]
    bias = f"{node.module}.bias" in graph.parameters
    if node.op == LINEAR:
        return nn.Linear(shape[1], shape[0], bias, device="meta").requires_grad_(False)
    a = node.attributes
    top, left, bottom, right = a["pads"]
    even = min(top, bottom), min(left, right)
    groups = int(a["group"])
    convolution = nn.Conv2d(
        shape[1] * groups,
        shape[0],
        tuple(shape[2:]),  # type: ignore[arg-type]
        tuple(a["strides"]),
        even,
        tuple(a["dilations"]),
        groups,
        bias,
        device="meta",
    ).requires_grad_(False)
    extra = left - even[1], right - even[1], top - even[0], bottom - even[0]
    return convolution if extra == NO_EXTRA else PaddedConvolution(convolution, extra)


def _place(root: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, attribute = path.rpartition(".")
    holder = _holder(root, parent)
    if attribute not in dict(holder.named_children()):  # a weight that several operators share
        holder.add_module(attribute, module)


def _holder(root: nn.Module, path: str) -> nn.Module:
    """Return the torch module at `path` below `root` of a graph's model; missing modules on the
    path are created."""
    for part in path.split(".") if path else ():
        if part not in dict(root.named_children()):
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    return root


def in_onnx_runtime(node: Node, file: Path, arguments: list[Any]) -> tuple[Tensor, ...]:
    """Compute in ONNX Runtime an operator of the graph that torch lacks; return its results.

    node: the operator
    file: ONNX model of this operator alone
    arguments: its inputs; None for one that the graph leaves out
    """
    names = [n for n in dict.fromkeys(node.inputs) if n]
    by_name = dict(zip(node.inputs, arguments, strict=True))
    arrays = {f"i{i}": by_name[name].detach().numpy() for i, name in enumerate(names)}
    try:
        computed = iter(_runner(file, file.stat().st_mtime_ns).infer(arrays).values())
    except HarnessError as e:
        raise NodeError(node, e.problem, arguments) from e
    results = [
        torch.from_numpy(next(computed).copy()) if n else torch.empty(0) for n in node.outputs
    ]
    # times one, so that random rounding (foundation/rounding) moves the result as of any operator
    return tuple(r * 1.0 if r.is_floating_point() else r for r in results)


class _OperatorSession(OrtRunner):
    """ONNX Runtime session of one operator of a graph whose others run in torch. Shapes of inputs
    are not checked, so that an axis may be empty."""

    def _check(self, arrays: Mapping[str, Any]) -> None:
        del arrays


@lru_cache(maxsize=256)
def _runner(file: Path, _modified: int) -> OrtRunner:
    return _OperatorSession(file, threads=1, fuse=False)
