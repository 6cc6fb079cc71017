"""Measure, operator by operator, how far a lowered graph is from the ONNX file that it came from.

    through   the lowered graph on the model's inputs: the errors of the operators before included
    alone     each operator of the lowered graph on the file's own tensors: its own error

Both are relative L2 of all rows together, as hop `compress` measures. No limit judges them: the
hops do that. `optimize explain` names the first node that matters by them (findings.py).

    Materials -> {"from", "rows", "not_compared": [node], "nodes": [{
        node, operator   name and operator
        module           module that it computes, or ""
        output           its tensor, of several the one that is furthest apart
        quantized        True where the lowered operator reads integers
        alone, through}]}

None for a model that is not an ONNX file, and for a target that does not read ONNX.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import OptimizeError
from optimizer.foundation.rounding.tolerance import Squares, compare_lengths, squares
from optimizer.harness.errors import HarnessError
from optimizer.harness.inputs.batch import Batch
from optimizer.lower.onnx import by_tensor
from optimizer.model.graph import record
from optimizer.validate.ledger.distance import Array
from optimizer.validate.ledger.pieces.pieces import AS_WRITTEN, cast_inputs
from optimizer.validate.materials import Materials

START = "ONNX Runtime on original/model.onnx"


def measure(m: Materials) -> dict[str, Any] | None:
    """Measure the distances by node in the form above. Return None for a model that is not an ONNX
    file, or a target that does not read ONNX; {"from", "why"} where a graph does not run, which a
    hop has refused."""
    checkpoint = m.source / "checkpoint"
    lowered = m.model / "model.onnx"
    if not record.is_graph(checkpoint) or not lowered.is_file():
        return None
    try:
        return _measure(m, record.read(checkpoint, {}), lowered)
    except (OptimizeError, HarnessError) as e:
        return {"from": START, "why": str(e)}


def _measure(m: Materials, graph: record.Graph, lowered: Path) -> dict[str, Any]:
    """Measure, node by node, how far the outputs of the user's ONNX file and of the lowered file
    are apart. Returns a document for the report.

    graph: nodes of the user's file
    lowered: lowered file
    """
    outputs = [name for node in graph.nodes for name in node.outputs]
    shared = set(by_tensor.list_float_tensors(m.source / "original" / "model.onnx")) & set(outputs)
    shared &= set(by_tensor.list_float_tensors(lowered))
    apart = _apart(m, shared)
    quantized = by_tensor.find_behind_modules(
        lowered, set(apart), {*m.state.modules, *m.state.summands}
    )
    nodes, others = [], []
    for node in graph.nodes:
        compared = [name for name in node.outputs if name in apart]
        if compared:
            output = max(compared, key=lambda name: apart[name][0])
            alone, through = apart[output]
            nodes.append(
                {
                    "node": node.name,
                    "operator": node.op,
                    "module": node.module,
                    "output": output,
                    "quantized": quantized[output],
                    "alone": alone,
                    "through": through,
                }
            )
        elif not node.module or node.op in (record.LINEAR, record.CONV):
            others.append(node.name)
    return {"from": START, "rows": _largest(m).rows, "nodes": nodes, "not_compared": others}


def _largest(m: Materials) -> Batch:
    """Choose the ledger's batch with the most rows, on which the nodes of the recipe's ONNX file
    are compared."""
    return max(m.batches, key=lambda b: b.rows)


def _rows(m: Materials) -> Iterator[dict[str, Array]]:
    """Yield the rows of the batch that _largest chooses, each as {input: array} of one row."""
    batch = _largest(m)
    for i in range(batch.rows):
        yield {name: array[i : i + 1] for name, array in batch.items()}


def _apart(m: Materials, shared: Collection[str]) -> dict[str, tuple[float, float]]:
    """Measure {tensor: (alone, through)} of the tensors in `shared`, which have one shape in both
    graphs. The tensors of one row are in memory at once."""
    original, lowered = m.source / "original" / "model.onnx", m.model / "model.onnx"
    each: dict[str, tuple[list[Squares], list[Squares]]] = {}
    with ExitStack() as stack:
        work = stack.enter_context(m.work_folder())
        files = [work / f"{name}.onnx" for name in ("file", "through", "alone")]
        by_tensor.write_through(original, shared, files[0])
        by_tensor.write_through(lowered, shared, files[1])
        of_file, of_lowered = (stack.enter_context(AS_WRITTEN.open(f)) for f in files[:2])
        of_each, own_name = None, dict[str, str]()
        for row in _rows(m):
            expected = of_file.infer(cast_inputs(of_file, row))
            through = of_lowered.infer(cast_inputs(of_lowered, row))
            if of_each is None:
                alike = {n: expected[n].ndim for n in shared if _alike(expected[n], through[n])}
                own_name = by_tensor.write_alone(lowered, alike, files[2])
                of_each = stack.enter_context(AS_WRITTEN.open(files[2]))
                each = {n: ([], []) for n in alike}
            alone = of_each.infer(cast_inputs(of_each, {**row, **expected}))
            for name, (own, all_before) in each.items():
                own.append(squares(alone[own_name[name]], expected[name]))
                all_before.append(squares(through[name], expected[name]))
    return {n: (_together(own), _together(before)) for n, (own, before) in each.items()}


def _alike(expected: Array, actual: Array) -> bool:
    return expected.shape == actual.shape and expected.size > 0


def _together(each: Sequence[Squares]) -> float:
    """Join the measured relative L2 distances of a node in single rows to that of all rows
    together."""
    apart, norms, sizes = zip(*each, strict=True)
    return compare_lengths([(sum(apart), sum(norms), sum(sizes))])[0]
