"""Compare the torch model of a graph with ONNX Runtime on the file as it is.

The reference is ONNX Runtime without fusions, on inputs drawn by ports.py: each row alone, and
where the file takes batches also all rows together, because rows must not depend on each other.
The limit is how far correct runs of this model lie apart (every operation rounded at random, as in
the ledger). An operator that torch does not compute becomes a file of one node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
import torch

from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.progress import say
from optimizer.foundation.rounding.random_rounding import Arithmetic, RandomRounding
from optimizer.foundation.rounding.tolerance import RUNS, UNIT, lengths, upper_bound
from optimizer.harness.errors import HarnessError
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.load.onnx_model import branches, first_nodes, refusals
from optimizer.load.onnx_model.draft import Array, Draft
from optimizer.load.onnx_model.ports import ROWS, Ports
from optimizer.model.checkpoint.model import materialize
from optimizer.model.graph import parts
from optimizer.model.graph.module import GraphModel, NodeError, in_onnx_runtime
from optimizer.model.graph.needs import PartNeeds, RandomlyRoundedRuns, measure
from optimizer.model.graph.record import BODY, Graph, Node

Answers = dict[str, Array]
FLOAT = Arithmetic(operands=True)


def answers(
    path: Path, ports: Ports, outputs: Sequence[str], model: onnx.ModelProto
) -> tuple[list[Answers], Answers]:
    """Run the ONNX file that is loaded in ONNX Runtime: ([outputs of each row alone], outputs of
    all rows together). Raises CheckpointError for a file that it does not run. model: the file's
    content
    """
    inputs = ports.draw(ROWS)
    try:
        opened = OrtRunner(path, threads=1, fuse=False)
    except HarnessError as e:
        raise CheckpointError(
            f"ONNX Runtime does not open it: {e.problem}",
            where=refusals.place(path, e.problem, model),
            accepted="a file that ONNX Runtime opens",
        ) from e
    try:
        with opened as runner:
            run = lambda arrays: {n: a for n, a in runner.infer(arrays).items() if n in outputs}  # noqa: E731
            alone, together = _rows_and_batch(run, inputs, ports)
    except HarnessError as e:
        raise CheckpointError(
            f"ONNX Runtime does not run it: {e.problem}",
            where=refusals.place(path, e.problem, model),
            accepted="a file that ONNX Runtime runs on drawn inputs",
            fix="Set model.ranges: {INPUT: [LOW, HIGH]} of an input that takes some values only.",
        ) from e
    return alone, {n: together[n] for n in outputs}


def _rows_and_batch(
    run: Callable[[Mapping[str, Array]], Answers], inputs: Mapping[str, Array], ports: Ports
) -> tuple[list[Answers], Answers]:
    """Run a loaded ONNX file or its torch model: ([outputs of each row alone], outputs of all rows
    together), joined for a model that takes one row only."""
    alone = [run({n: a[i : i + 1] for n, a in inputs.items()}) for i in range(ROWS)]
    if ports.single:
        return alone, {n: np.concatenate([one[n] for one in alone]) for n in alone[0]}
    return alone, run(inputs)


def runnable(
    graph: Graph,
    draft: Draft,
    tensors: Mapping[str, Any],
    ports: Ports,
    tell: Callable[[str], object] = say,
) -> Graph:
    """Return a loaded ONNX file's graph with a file for each operator that torch does not compute.
    Raises CheckpointError for one that ONNX Runtime does not run alone either. tell: called with a
    sentence on each"""
    protos = {node.name: node.proto for node in draft.nodes}
    inputs = {n: torch.from_numpy(a) for n, a in ports.draw(ROWS).items()}
    while True:
        model = _filled(graph, tensors)
        try:
            with torch.no_grad():
                model(**inputs)
            return graph
        except NodeError as e:
            if e.node.file or protos.get(e.node.name) is None:
                raise CheckpointError(
                    f"{e.node.op} cannot be run: {e.why}",
                    where=f"node {e.node.name!r}",
                    fix="Export the model with a dynamic first axis." if ports.single else "",
                ) from e
            name = f"operators/{sum(bool(n.file) for n in graph.nodes)}.onnx"
            node = _to_file(e.node, e.arguments, protos[e.node.name], graph, name)
            tell(_stays_float(node, e.why))
            graph = _exchanged(graph, node)


def needs(
    graph: Graph, tensors: Mapping[str, Any], ports: Ports
) -> tuple[tuple[PartNeeds, ...], RandomlyRoundedRuns]:
    """Measure, when an ONNX file is loaded, the memory and operations of the graph's parts on drawn
    rows, and the seconds of the correct runs that set the limits."""
    inputs = {n: torch.from_numpy(a) for n, a in ports.draw(ROWS).items()}
    return measure(_filled(graph, tensors), inputs)


def measured(graph: Graph, tensors: Mapping[str, Any], ports: Ports) -> Graph:
    """Return a loaded ONNX file's graph with the beginnings of its parts (model/graph/parts.py), by
    the sizes in a run, and with the types of tensors that operators outside of ONNX's own make."""
    model, sizes = _filled(graph, tensors), dict[str, int]()
    custom_types: dict[str, tuple[str, int]] = {}

    def measure(node: Node, _: list[Any], results: tuple[torch.Tensor, ...]) -> None:
        for name, result in zip(node.outputs, results, strict=False):
            if result.dtype == torch.float32:
                sizes[name] = result.nbytes // ROWS
            if node.domain and name:
                custom_types[name] = str(result.numpy().dtype), result.ndim

    body: Any = model.get_submodule(BODY)
    body.observe = measure
    with torch.no_grad():
        model(**{n: torch.from_numpy(a) for n, a in ports.draw(ROWS).items()})
    return replace(graph, starts=parts.starts(graph, sizes), custom_types=custom_types)


def first_undefined(graph: Graph, tensors: Mapping[str, Any], ports: Ports) -> Node | None:
    """Find in a loaded ONNX file the first node that makes NaN or infinity of finite drawn rows."""
    inputs = {n: torch.from_numpy(a) for n, a in ports.draw(ROWS).items()}
    return first_nodes.undefined(_filled(graph, tensors), inputs)


def with_node(
    error: CheckpointError, graph: Graph, tensors: Mapping[str, Any], ports: Ports
) -> CheckpointError:
    """Return `error` of load's comparison of an ONNX file, extended by the first node whose rows
    depend on each other."""
    inputs = {n: torch.from_numpy(a) for n, a in ports.draw(ROWS).items()}
    node = first_nodes.mixing(_filled(graph, tensors), inputs)
    if node is None:
        return error
    where = f"{error.where}: first at node {node.name!r} ({node.op})"
    return CheckpointError(error.problem, where=where, accepted=error.accepted, fix=error.fix)


def _filled(graph: Graph, tensors: Mapping[str, Any]) -> GraphModel:
    model = GraphModel(graph).eval()
    materialize(model, "", tensors)
    return model


def _exchanged(graph: Graph, node: Node) -> Graph:
    return replace(graph, nodes=tuple(node if n.name == node.name else n for n in graph.nodes))


def _stays_float(node: Node, why: str) -> str:
    return f"load: node {node.name!r} ({node.op}) stays float and runs in ONNX Runtime: {why}"


def _to_file(node: Node, values: Sequence[Any], proto: Any, graph: Graph, file: str) -> Node:
    """Write an ONNX model of one node, which torch cannot compute, to `file` below the graph's
    folder; returns the node with that file.

    values: inputs of the node
    """
    (graph.folder / "operators").mkdir(parents=True, exist_ok=True)
    names = [n for n in dict.fromkeys(node.inputs) if n]
    arguments = dict(zip(node.inputs, values, strict=True))
    inner = {name: f"i{i}" for i, name in enumerate(names)} | {"": ""}
    alone = onnx.NodeProto()
    alone.CopyFrom(proto)
    del alone.input[:], alone.output[:]
    alone.input.extend(inner[n] for n in node.inputs)
    alone.output.extend(f"o{i}" if n else "" for i, n in enumerate(node.outputs))
    inputs = [
        onnx.helper.make_tensor_value_info(
            inner[n],
            onnx.helper.np_dtype_to_tensor_dtype(arguments[n].detach().numpy().dtype),
            None,
        )
        for n in names
    ]
    outputs = [onnx.ValueInfoProto(name=n) for n in alone.output if n]
    model = onnx.helper.make_model(
        onnx.helper.make_graph([alone], "node", inputs, outputs),
        opset_imports=[
            onnx.helper.make_opsetid("", graph.opset),
            *([onnx.helper.make_opsetid(node.domain, 1)] if node.domain else []),
        ],
        ir_version=10,
    )
    (graph.folder / file).write_bytes(model.SerializeToString())
    return replace(node, file=file)


def without_misread(graph: Graph, draft: Draft, tensors: Mapping[str, Any], ports: Ports) -> Graph:
    """Return a loaded ONNX file's graph with a file for each operator that torch computes further
    from ONNX Runtime than rounding explains, on the same inputs of this operator; `graph` itself if
    there is none."""
    protos = {node.name: node.proto for node in draft.nodes}
    inputs = {n: torch.from_numpy(a) for n, a in ports.draw(ROWS).items()}
    model = _filled(graph, tensors)
    body: Any = model.get_submodule(BODY)
    misread: list[Node] = []
    files = sum(bool(n.file) for n in graph.nodes)

    def judge(node: Node, arguments: list[Any], results: tuple[torch.Tensor, ...]) -> None:
        if node.module or node.file or protos.get(node.name) is None:
            return
        name = f"operators/{files + len(misread)}.onnx"
        alone = _to_file(node, arguments, protos[node.name], graph, name)
        try:
            theirs = in_onnx_runtime(alone, graph.folder / name, arguments)
        except NodeError:  # a file of one row, whose node ONNX Runtime does not run on several
            theirs = results
        if _apart(lambda: body.in_torch(node, arguments), results, theirs):
            misread.append(alone)
        else:
            (graph.folder / name).unlink()

    body.observe = judge
    with torch.no_grad():
        model(**inputs)
    for node in misread:
        say(_stays_float(node, "torch computes it otherwise"))
        graph = _exchanged(graph, node)
    return graph


def _apart(
    run: Callable[[], Sequence[torch.Tensor]],
    ours: Sequence[torch.Tensor],
    theirs: Sequence[torch.Tensor],
) -> bool:
    """Test, when an ONNX file is loaded, that an operator's results in torch and ONNX Runtime
    differ by more than correct runs of it do, or at all of whole numbers."""
    runs = []
    for seed in range(RUNS):
        with RandomRounding(FLOAT, seed):
            runs.append([t.numpy() for t in run()])
    for i, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        a, b = mine.numpy(), other.numpy()
        if a.shape != b.shape or (a.dtype.kind != "f" and not np.array_equal(a, b)):
            return True
        if a.dtype.kind != "f" or not a.size:
            continue
        each = [(one[i], two[i]) for k, one in enumerate(runs) for two in runs[k + 1 :]]
        limit = _limit(lengths(each), RUNS, 2)
        if not max(lengths([(a, b)])) <= limit:
            return True
    return False


def _limit(
    apart: Sequence[float], independent: int, looks: int, unit: float = UNIT["fp32"]
) -> float:
    """Compute for load's check of an ONNX file the upper_bound of distances of which none counts as
    less than one roundoff: where most runs agree to the bit, the others would otherwise lie many
    standard deviations above them."""
    return upper_bound(np.maximum(apart, unit).tolist(), independent, looks, unit)


class Origin(Protocol):
    """Model that an ONNX file was exported or converted from, as a second reference.

    example: {input: rows} that its author gives; empty for none
    arithmetic: rounding of correct runs
    """

    @property
    def name(self) -> str: ...

    @property
    def arithmetic(self) -> Arithmetic: ...

    @property
    def example(self) -> Mapping[str, torch.Tensor]: ...

    def answers(self, inputs: Mapping[str, Any]) -> Answers: ...


@dataclass(frozen=True)
class _Compared:
    """Answers of a loaded ONNX file's torch model to a batch, and how far rounding moves a row of
    each output: the median distance of correct runs, and the limit."""

    ours: Answers
    medians: Mapping[str, float]
    limits: Mapping[str, float]


Figures = dict[str, dict[str, float]]
"""{output: {"relative_l2", "max_abs", "cosine", "worst_example", "median", "limit"}} of the answers
nearest to their limit; the first four as in validate/ledger/distance.py."""


def compare(
    graph: Graph,
    tensors: Mapping[str, Any],
    ports: Ports,
    expected: tuple[list[Answers], Answers],
    path: Path,
    origin: Origin | None = None,
) -> dict[str, Any] | None:
    """Check at load our reading of an ONNX file: raise CheckpointError where an output of the torch
    model is further from ONNX Runtime's, or from that of the file's origin, than rounding explains.

    Returns {"name", "rows", "runs", "unit_roundoff", "outputs": Figures} of the origin, rows in
    words; None without an origin.
    """
    model, drawn = _filled(graph, tensors), ports.draw(ROWS)
    looks = 2 if origin is None else 6
    compared = _compared(model, drawn, looks, path, FLOAT)
    worst = _nearest(_judge(compared, expected, "ONNX Runtime's answer to the file", path))
    branches.warn(model, {n: torch.from_numpy(a) for n, a in drawn.items()})
    say(
        f"load: {ROWS} drawn rows have the outputs of ONNX Runtime: apart by at most {worst:.2g} "
        "of what rounding may do"
    )
    if origin is None:
        return None
    example = {n: np.resize(t.numpy(), (ROWS, *t.shape[1:])) for n, t in origin.example.items()}
    figures: Figures = {}
    for inputs in (drawn, example) if example else (drawn,):
        each = _compared(model, inputs, looks, path, origin.arithmetic)
        theirs = _rows_and_batch(origin.answers, inputs, ports)
        for name, those in _judge(each, theirs, f"the answer of {origin.name}", path).items():
            figures[name] = max(figures.get(name, those), those, key=_share)
    rows = f"{ROWS} drawn rows{' and those of the example' if example else ''}"
    say(
        f"load: {rows} have the outputs of {origin.name}: apart by at most "
        f"{_nearest(figures):.2g} of what rounding may do"
    )
    return {
        "name": origin.name,
        "rows": rows,
        "runs": RUNS,
        "unit_roundoff": origin.arithmetic.unit,
        "outputs": figures,
    }


def _share(figures: Mapping[str, float]) -> float:
    return figures["worst_example"] / figures["limit"]


def _nearest(figures: Figures) -> float:
    """Find, of load's comparison of an ONNX file, the largest distance of a row as a share of its
    limit."""
    return max(map(_share, figures.values()))


def _compared(
    model: GraphModel, arrays: Mapping[str, Array], looks: int, path: Path, arithmetic: Arithmetic
) -> _Compared:
    """Run a batch of ROWS rows through a loaded ONNX file's torch model, and again with every
    operation rounded at random. looks: comparisons per row and output. Raises CheckpointError for
    outputs that rounding moves by their own size."""
    inputs = {n: torch.from_numpy(a) for n, a in arrays.items()}

    def run() -> Answers:
        with torch.no_grad():
            return {n: t.numpy() for n, t in model(**inputs).items()}

    ours, runs = run(), list[Answers]()
    limits, medians = dict[str, float](), dict[str, float]()
    for seed in range(RUNS):
        with RandomRounding(arithmetic, seed):
            runs.append(run())
    for name in ours:
        pairs = [(a[name], b[name]) for i, a in enumerate(runs) for b in (*runs[i + 1 :], ours)]
        apart = [d for a, b in pairs for d in lengths(list(zip(a, b, strict=True)))]
        medians[name] = float(np.median(apart))
        limits[name] = limit = _limit(
            apart, ROWS * (RUNS // 2), looks * ROWS * len(ours), arithmetic.unit
        )
        if limit >= 1:  # then zeros in place of the answer would pass
            body: Any = model.get_submodule(BODY)
            node = next(n for n in body.graph.nodes if name in n.outputs)
            moved = f"by {limit:.2g} of its size" if np.isfinite(limit) else "to infinity"
            raise CheckpointError(
                f"rounding alone may move output {name!r} {moved} on drawn inputs, where it is at "
                f"most {np.abs(ours[name]).max():.2g}, so that a comparison shows nothing",
                where=f"{path}: node {node.name!r} ({node.op})",
                accepted="outputs that the same row determines",
                fix="Name the outputs to keep: model.outputs: [...]; or set model.ranges: {INPUT: "
                "[LOW, HIGH]} of an input that takes smaller or, where the output vanishes, larger "
                "values.",
            )
    return _Compared(ours, medians, limits)


def _judge(
    compared: _Compared, expected: tuple[list[Answers], Answers], whose: str, path: Path
) -> Figures:
    """Judge at load the outputs of an ONNX file's torch model: the figures of each. whose: answers
    that are expected, for messages. Raises CheckpointError for a row beyond its limit."""
    alone, together = expected
    figures: Figures = {}
    for name, mine in compared.ours.items():
        limit = compared.limits[name]
        rows = np.concatenate([one[name] for one in alone])
        for how, theirs in (("each row alone", rows), ("all rows together", together[name])):
            if mine.shape != theirs.shape:
                raise CheckpointError(
                    f"output {name!r} of {ROWS} rows has shape {mine.shape} where {whose} has "
                    f"{theirs.shape}, with {how}",
                    where=str(path),
                    accepted="a graph that takes several rows",
                    fix="Export the model with a dynamic first axis.",
                )
            far = lengths(list(zip(mine, theirs, strict=True)))
            if not max(far) <= limit:
                raise CheckpointError(
                    f"output {name!r}: a row is {max(far):.2e} (relative L2) from {whose}, with "
                    f"{how}; rounding may do {limit:.2e}",
                    where=str(path),
                    accepted="a graph whose operators are computed as in the original, and whose "
                    "rows do not depend on each other",
                    fix="Export the model with a dynamic first axis, in evaluation mode.",
                )
            those = {"median": compared.medians[name], "limit": limit, "worst_example": max(far)}
            those |= _distances(mine, theirs)
            figures[name] = max(figures.get(name, those), those, key=_share)
    return figures


def _distances(mine: Array, theirs: Array) -> dict[str, float]:
    a, b = (x.reshape(len(x), -1).astype(np.float64) for x in (mine, theirs))
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    cosines = np.divide((a * b).sum(1), norms, out=np.ones(len(a)), where=norms > 0)
    whole = np.linalg.norm(b)
    return {
        "relative_l2": float(np.linalg.norm(a - b) / whole) if whole else 0.0,
        "max_abs": float(np.abs(a - b).max(initial=0.0)),
        "cosine": float(cosines.min(initial=1.0)),
    }
