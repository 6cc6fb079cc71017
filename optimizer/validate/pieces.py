"""Run a graph's pieces on the tensors that torch computed at the cuts, and compare.

Each linear module gets torch's own input and must give torch's output; everything between two
modules gets torch's module outputs and must give the next module's input. So a fault shows at
full size in the one piece that has it, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.harness.errors import HarnessError
from optimizer.harness.runtimes.ort import OrtRunner, check_names
from optimizer.lower import cut
from optimizer.lower.cut import Edge
from optimizer.validate.distance import Array, Distance, distance, typical
from optimizer.validate.trace import Trace

Found = dict[str, Distance]


class Graph(OrtRunner):
    """A graph or a piece of one, whose cache may be empty. What ONNX Runtime refuses while it runs
    is a HarnessError: a damaged graph fails its hop, not the whole proof."""

    def _check(self, arrays: Mapping[str, Array]) -> None:
        check_names(set(arrays), set(self.inputs), self.model.name)

    def infer(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        with _refusals(self.model):
            return super().infer(arrays)

    def run_bound(self, binding: Any) -> None:
        with _refusals(self.model):
            super().run_bound(binding)


@contextmanager
def _refusals(model: Path) -> Iterator[None]:
    try:
        yield
    except HarnessError:
        raise
    except Exception as e:  # the binding raises a dozen unrelated classes
        first = (str(e).splitlines() or [type(e).__name__])[0]
        raise HarnessError(f"it cannot be run ({first[:200]})", where=str(model)) from None


def numbered(at: Sequence[Edge]) -> list[tuple[Edge, tuple[str, int]]]:
    """Each edge with its (module, use), as a Trace names it."""
    seen: dict[str, int] = {}
    made = []
    for edge in at:
        use = seen[edge.module] = seen.get(edge.module, -1) + 1
        made.append((edge, (edge.module, use)))
    return made


def modules(
    model: Path,
    at: Sequence[Edge],
    traces: Sequence[Trace],
    work: Path,
    fuse: bool,
    only: Collection[str] | None = None,
    coded: bool = False,
) -> Found:
    """{module: distance of its output}, each module alone; `only` some of those in `at`. coded: its
    input is coded by other arithmetic than torch's, so that a flipped code here and there is no
    fault (distance.typical)."""
    uses = [(e, key) for e, key in numbered(at) if only is None or e.module in only]
    piece = work / "modules.onnx"
    cut.write_modules(model, [e for e, _ in uses], piece)
    pairs: dict[str, list[tuple[Array, Array]]] = {}
    with Graph(piece, threads=1, fuse=fuse) as runner:
        for trace in (t for t in traces if not t.past):  # a continued text has the same tokens
            given = {e.input: _shaped(trace.inputs[key], e.input_rank) for e, key in uses}
            out = runner.infer(typed(runner, given))
            for edge, key in uses:
                wanted = trace.outputs[key]
                pairs.setdefault(edge.module, []).extend(trace.pairs(out[edge.output], wanted))
    return {name: (typical if coded else distance)(p) for name, p in pairs.items()}


def rest(model: Path, at: Sequence[Edge], traces: Sequence[Trace], work: Path, fuse: bool) -> Found:
    """{"<module>:input" or output name: distance}, what lies between the modules; the outputs of a
    decoder are its cache as well."""
    piece = work / "rest.onnx"
    cut.write_rest(model, at, piece)
    pairs: dict[str, list[tuple[Array, Array]]] = {}
    with Graph(piece, threads=1, fuse=fuse) as runner:
        for trace in traces:
            cuts = {e.output: _shaped(trace.outputs[key], e.output_rank) for e, key in numbered(at)}
            out = runner.infer(typed(runner, {**trace.given, **cuts}))
            targets = {f"{m}:input": (e.input, trace.inputs[m, u]) for e, (m, u) in numbered(at)}
            targets |= {name: (name, wanted) for name, wanted in trace.result.items()}
            for label, (name, wanted) in targets.items():
                if name not in out:  # a module that reads another's output, or a model's input
                    continue
                pairs.setdefault(label, []).extend(trace.pairs(out[name], wanted))
    return {name: distance(p) for name, p in pairs.items()}


def _shaped(array: Array, rank: int) -> Array:
    """(batch, sequence, width) as the graph has it there: perhaps flattened to rank 2."""
    if array.ndim == rank:
        return array
    return array.reshape(-1, array.shape[-1]) if rank == 2 else array.reshape(rank * (1,))


def typed(runner: OrtRunner, arrays: dict[str, Array]) -> dict[str, Array]:
    """Floats in the type each input of the piece has; inputs the piece lost are left out."""
    wanted = runner.inputs
    return {
        name: arrays[name].astype(kind) if kind is not None else arrays[name]
        for name, kind in wanted.items()
    }


def beyond(found: Found, limit: float) -> list[str]:
    """The names whose worst example is further than `limit`, in graph order."""
    return [name for name, d in found.items() if not d.worst <= limit]


def worst(found: Found) -> float:
    return max((d.worst for d in found.values()), default=0.0)


def whole(
    model: Path, traces: Sequence[Trace], names: Collection[str], fuse: bool
) -> list[dict[str, Array]]:
    """The graph's outputs for each trace's inputs."""
    with Graph(model, threads=1, fuse=fuse) as runner:
        results = [runner.infer(typed(runner, dict(t.given))) for t in traces]
    return [{n: np.asarray(r[n], np.float32) for n in names} for r in results]
