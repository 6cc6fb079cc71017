"""Measure the memory and time that the parts of a graph need per row, in a run on a few rows.

`compress` predicts its own needs from these (compress/graph_estimate.py), because the shapes of
weights do not tell the sizes of images and of activations.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optimizer.foundation.process import resident, threads
from optimizer.foundation.rounding.random_rounding import Arithmetic, RandomRounding
from optimizer.foundation.rounding.tolerance import RUNS
from optimizer.model.graph.module import GraphModel, PartModule
from optimizer.model.graph.parts import GraphPart
from optimizer.model.graph.record import BODY, CONV, LINEAR, PARTS, Graph, Node
from optimizer.store import CompressedShapes, Shapes

WARM = 2  # runs; the first one of a process is slower
OPENED = 7  # copies of a file's weights while it is checked and loaded; `run` checks it first
BESIDE = 3  # copies of weights that are external data (measured: 2.5, and 5.3 of those in the file)


@dataclass(frozen=True)
class PartNeeds:
    """Memory and time that one part of a model that is an ONNX graph needs for one row. Sizes are
    in bytes.

    parameters: names of the part's parameters
    positions: {linear layer or convolution: rows of its input as a matrix}
    edges: total size of the inputs and outputs of its linear layers and convolutions
    enters: size of the tensor that comes from the part before
    gives: size of the tensor that goes to the next part
    carried: {other tensor that it reads: size}
    live: peak size of the tensors in memory at once
    seconds: processor time on one thread
    """

    parameters: tuple[str, ...]
    positions: Mapping[str, int]
    edges: int
    enters: int
    gives: int
    carried: Mapping[str, int]
    live: int
    seconds: float


@dataclass(frozen=True)
class RandomlyRoundedRuns:
    """Processor time of runs in which every operation is rounded at random, on one thread. The
    ledger derives its tolerances from such runs (foundation/rounding/random_rounding.py).

    run: seconds per run, without its rows; weights are rounded once per run
    row: seconds per row
    memory: bytes that these runs take
    """

    run: float
    row: float
    memory: int

    def seconds(self, rows: int) -> float:
        """Return the seconds of RUNS runs of the graph's model on `rows` rows each."""
        return RUNS * (self.run + rows * self.row)


class GraphShapes(dict[str, tuple[int, ...]]):
    """Shapes of a graph's parameters, with the measured needs of its parts.

    parts: needs of each part
    modules: names of the linear layers and convolutions that may be quantized
    rounded: time and memory of runs that are rounded at random
    libraries: bytes of anonymous memory of this process before the file was opened
    opened: bytes of the file's weights, with copies, while it is checked and loaded
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        parts: tuple[PartNeeds, ...],
        modules: tuple[str, ...],
        rounded: RandomlyRoundedRuns,
        libraries: int,
        opened: int,
    ) -> None:
        super().__init__(shapes)
        self.parts, self.modules, self.rounded = parts, modules, rounded
        self.libraries, self.opened = libraries, opened

    @property
    def seconds(self) -> float:
        """Processor time of one row of the graph's model on one thread, from which stages predict
        their own."""
        return sum(part.seconds for part in self.parts)


def libraries_of(shapes: Shapes, usual: int) -> int:
    """Return the bytes of memory that a process takes before a stage works: measured for a model
    that is an ONNX graph, else `usual`."""
    graph = graph_of(shapes)
    return usual if graph is None else graph.libraries


def graph_of(shapes: Shapes) -> GraphShapes | None:
    """Return the shapes of a graph, looking through those of a compressed model; None for other
    models."""
    while isinstance(shapes, CompressedShapes):
        shapes = shapes.before
    return shapes if isinstance(shapes, GraphShapes) else None


def measure(
    model: GraphModel, inputs: Mapping[str, Tensor]
) -> tuple[tuple[PartNeeds, ...], RandomlyRoundedRuns]:
    """Run a model that is an ONNX graph on one thread; return (needs of its parts, time of randomly
    rounded runs).

    model: model with its weights
    inputs: {input: array of some rows}; needs are divided by the number of rows
    """
    (needs,) = threads.map_in_threads(
        lambda _: (_measure(model, inputs), _rounded(model, inputs)), [None]
    )
    return needs


def _rounded(model: GraphModel, inputs: Mapping[str, Tensor]) -> RandomlyRoundedRuns:
    rows, seconds = len(next(iter(inputs.values()))), list[float]()
    with resident.sampled() as sizes:
        for count in (1, 1, rows):  # the first one draws the random numbers
            some = {name: value[:count] for name, value in inputs.items()}
            before = time.thread_time()
            with torch.no_grad(), RandomRounding(Arithmetic(operands=True), 0):
                model(**some)
            seconds.append(time.thread_time() - before)
    row = max(seconds[2] - seconds[1], 0.0) / max(rows - 1, 1)
    return RandomlyRoundedRuns(max(seconds[1] - row, 0.0), row, max(sizes) - sizes[0])


def _measure(model: GraphModel, inputs: Mapping[str, Tensor]) -> tuple[PartNeeds, ...]:
    """Run a model that is an ONNX graph WARM times and return the needs of its parts per row; times
    are the least of the runs."""
    body: Any = model.get_submodule(BODY)
    rows = len(next(iter(inputs.values())))
    sizes = {name: value.nbytes // rows for name, value in inputs.items()}
    positions: dict[str, int] = {}
    seconds: dict[tuple[str, ...], float] = {}  # by the names of a node's outputs
    before = 0.0

    def look(node: Node, _: list[Any], results: tuple[Tensor, ...]) -> None:
        nonlocal before
        taken = time.thread_time() - before
        seconds[node.outputs] = min(taken, seconds.get(node.outputs, taken))
        sizes.update(
            (n, r.nbytes // rows) for n, r in zip(node.outputs, results, strict=False) if n
        )
        if node.module and node.op in (LINEAR, CONV):
            channels = 1 if node.op == CONV else -1
            positions[node.module] = results[0].numel() // results[0].shape[channels] // rows
        before = time.thread_time()

    body.observe = look
    with torch.no_grad():
        for _ in range(WARM):
            before = time.thread_time()
            model(**inputs)
    body.observe = None
    parts: Any = model.get_submodule(PARTS)
    needs = []
    for module in parts:
        each = [seconds[body.graph.nodes[i].outputs] for i in module.part.nodes]
        needs.append(_of_part(body.graph, module, sizes, positions, sum(each) / rows))
    return tuple(needs)


def _of_part(
    graph: Graph,
    module: PartModule,
    sizes: Mapping[str, int],
    positions: Mapping[str, int],
    seconds: float,
) -> PartNeeds:
    """Measure memory and time that one part of a model that is an ONNX graph needs.

    sizes: {tensor: bytes per row}
    positions: {linear layer or convolution: rows of its input as a matrix}
    seconds: processor time of the part per row
    """
    part: GraphPart = module.part
    nodes = [graph.nodes[i] for i in part.nodes]
    entering = part.reads[:1]
    modules = [n.module for n in nodes if n.module in positions]
    return PartNeeds(
        parameters=tuple(
            name
            for name in graph.parameters
            if any(name == path or name.startswith(f"{path}.") for path in part.paths)
        ),
        positions={name: positions[name] for name in modules},
        edges=sum(
            sizes[name]
            for node in nodes
            if node.module in positions
            for name in (node.inputs[0], node.outputs[0])
        ),
        enters=sum(sizes[name] for name in entering),
        gives=sum(sizes.get(name, 0) for name in part.gives),
        carried={name: sizes[name] for name in part.reads if name not in entering},
        live=_live(graph, module, sizes),
        seconds=seconds,
    )


def _live(graph: Graph, module: PartModule, sizes: Mapping[str, int]) -> int:
    """Return the peak bytes of tensors in memory while the nodes of a part run, per row.

    sizes: {tensor: bytes per row}
    """
    live = {name: sizes[name] for name in module.part.reads}
    most = 0
    for i in module.part.nodes:
        live |= {name: sizes[name] for name in graph.nodes[i].outputs if name in sizes}
        most = max(most, sum(live.values()))
        for name in module.last.get(i, ()):
            live.pop(name, None)
    return most
