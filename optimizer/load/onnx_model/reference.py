"""Compare the torch model of a graph with ONNX Runtime on the file as it is.

The reference is ONNX Runtime without fusions, on inputs drawn by ports.py: each row alone, and
where the file takes batches also all rows together, because rows must not depend on each other.
The limit is how far correct runs of this model lie apart (every operation rounded at random, as in
the ledger). An operator that torch does not compute becomes a file of one node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.progress import say
from optimizer.foundation.rounding.random_rounding import Arithmetic, RandomRounding
from optimizer.foundation.rounding.tolerance import RUNS, UNIT, lengths, upper_bound
from optimizer.harness.errors import HarnessError
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.load.onnx_model.draft import Array, Draft
from optimizer.load.onnx_model.ports import ROWS, Ports
from optimizer.model.checkpoint.model import materialize
from optimizer.model.graph.module import GraphModel, NodeError
from optimizer.model.graph.record import Graph, Node

Answers = dict[str, Array]


def answers(path: Path, ports: Ports, outputs: Sequence[str]) -> tuple[list[Answers], Answers]:
    """([outputs of each row alone], outputs of all rows together) of the file in ONNX Runtime.
    Raises CheckpointError for a file that it does not run."""
    inputs = ports.draw(ROWS)
    try:
        with OrtRunner(path, threads=1, fuse=False) as runner:
            run = lambda arrays: {n: a for n, a in runner.infer(arrays).items() if n in outputs}  # noqa: E731
            alone = [run({n: a[i : i + 1] for n, a in inputs.items()}) for i in range(ROWS)]
            together = (
                {n: np.concatenate([one[n] for one in alone]) for n in alone[0]}
                if ports.single
                else run(inputs)
            )
    except HarnessError as e:
        raise CheckpointError(
            f"ONNX Runtime does not run it: {e.problem}",
            where=str(path),
            accepted="a file that ONNX Runtime runs on drawn inputs",
            fix="Set model.ranges: {INPUT: [LOW, HIGH]} of an input that takes some values only.",
        ) from e
    return alone, {n: together[n] for n in outputs}


def runnable(graph: Graph, draft: Draft, tensors: Mapping[str, Any], ports: Ports) -> Graph:
    """The graph with a file for each operator that torch does not compute. Raises CheckpointError
    for one that ONNX Runtime does not run alone either."""
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
            node = _to_file(e, protos[e.node.name], graph)
            nodes = tuple(node if n.name == node.name else n for n in graph.nodes)
            graph = replace(graph, nodes=nodes)


def _filled(graph: Graph, tensors: Mapping[str, Any]) -> GraphModel:
    model = GraphModel(graph).eval()
    materialize(model, "", tensors)
    return model


def _to_file(error: NodeError, proto: Any, graph: Graph) -> Node:
    """Write the model of one node; return the node with its file."""
    node = error.node
    (graph.folder / "operators").mkdir(parents=True, exist_ok=True)
    count = sum(bool(n.file) for n in graph.nodes)
    names = [n for n in dict.fromkeys(node.inputs) if n]
    arguments = dict(zip(node.inputs, error.arguments, strict=True))
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
    file = f"operators/{count}.onnx"
    (graph.folder / file).write_bytes(model.SerializeToString())
    say(f"load: node {node.name!r} ({node.op}) stays float and runs in ONNX Runtime: {error.why}")
    return replace(node, file=file)


def compare(
    graph: Graph,
    tensors: Mapping[str, Any],
    ports: Ports,
    expected: tuple[list[Answers], Answers],
    path: Path,
) -> None:
    """Raise CheckpointError where an output of the torch model is further from ONNX Runtime's than
    rounding explains."""
    alone, together = expected
    model = _filled(graph, tensors)
    inputs = {n: torch.from_numpy(a) for n, a in ports.draw(ROWS).items()}

    def run() -> Answers:
        with torch.no_grad():
            return {n: t.numpy() for n, t in model(**inputs).items()}

    ours, runs = run(), []
    for seed in range(RUNS):
        with RandomRounding(Arithmetic(operands=True), seed):
            runs.append(run())
    worst = 0.0
    for name, mine in ours.items():
        pairs = [(a[name], b[name]) for i, a in enumerate(runs) for b in (*runs[i + 1 :], ours)]
        apart = [d for a, b in pairs for d in lengths(list(zip(a, b, strict=True)))]
        limit = upper_bound(apart, ROWS * (RUNS // 2), 2 * ROWS * len(ours), UNIT["fp32"])
        rows = np.concatenate([one[name] for one in alone])
        for how, theirs in (("each row alone", rows), ("all rows together", together[name])):
            far = lengths(list(zip(mine, theirs, strict=True)))
            if not max(far) <= limit:
                raise CheckpointError(
                    f"output {name!r}: a row is {max(far):.2e} (relative L2) from ONNX Runtime's "
                    f"answer to the file, with {how}; rounding may do {limit:.2e}",
                    where=str(path),
                    accepted="a graph whose operators are computed as ONNX Runtime computes them, "
                    "and whose rows do not depend on each other",
                    fix="Export the model with a dynamic first axis, in evaluation mode.",
                )
            worst = max(worst, max(far) / limit)
    say(
        f"load: {ROWS} drawn rows have the outputs of ONNX Runtime: apart by at most {worst:.2g} "
        "of what rounding may do"
    )
