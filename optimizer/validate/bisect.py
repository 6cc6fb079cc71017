"""Name the first bad module, in a number of runs that grows with the logarithm of the modules.

first_bad       the search itself, over any question "is there a fault among these?"
in_modules      a graph's linear modules, half of them at a time, cut out of the graph and given
                torch's own inputs (lower/cut.py); no tensor becomes an output of the whole graph
in_prefix       everything else: the graph up to the inputs of ever fewer modules, against torch
in_torch        a compressed state: the first modules compressed and the others in float
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from optimizer.compress.simulate import simulated
from optimizer.lower import cut
from optimizer.lower.cut import Edge
from optimizer.validate import pieces, trace
from optimizer.validate.distance import distance
from optimizer.validate.materials import Materials
from optimizer.validate.trace import Trace

T = TypeVar("T")


def first_bad(items: Sequence[T], bad: Callable[[Sequence[T]], bool]) -> T | None:
    """The first item with a fault, or None when `bad` finds none among all.

    bad(part): whether a consecutive part holds a fault. Asked 1 + log2(len(items)) times at most:
    the left half is asked about, and when it is clean the fault is in the right one.
    """
    if not items or not bad(items):
        return None
    low, high = 0, len(items)
    while high - low > 1:
        middle = (low + high) // 2
        if bad(items[low:middle]):
            high = middle
        else:
            low = middle
    return items[low]


def in_modules(
    model: Path, modules: Sequence[str], traces: Sequence[Trace], limit: float, fuse: bool = False
) -> str | None:
    """The first linear module whose output, on torch's input, is further than `limit` from
    torch's output."""
    at = cut.edges(model, modules)
    order = list(dict.fromkeys(e.module for e in at))

    def bad(part: Sequence[str]) -> bool:
        chosen = set(part)
        with tempfile.TemporaryDirectory() as work:
            found = pieces.modules(model, at, traces, Path(work), fuse, chosen)
        return bool(pieces.beyond(found, limit))

    return first_bad(order, bad)


def in_prefix(
    model: Path, modules: Sequence[str], traces: Sequence[Trace], limit: float
) -> str | None:
    """The first module, in graph order, whose input is further than `limit` from torch's when the
    graph is run from its start: the fault lies before it and after the module before."""
    at = pieces.numbered(cut.edges(model, modules))

    def bad(part: Sequence[tuple[Edge, tuple[str, int]]]) -> bool:
        edge, key = part[-1]
        with tempfile.TemporaryDirectory() as work:
            piece = Path(work) / "prefix.onnx"
            cut.write_prefix(model, [edge], piece)
            with pieces.Graph(piece, threads=1, fuse=False) as runner:
                for t in traces:
                    wanted = t.inputs[key]
                    given = pieces.typed(runner, dict(t.given))
                    found = runner.infer(given)[edge.input].reshape(wanted.shape)
                    pairs = zip(t.examples(found), t.examples(wanted), strict=True)
                    if not distance(pairs).worst <= limit:
                        return True
        return False

    found = first_bad(at, bad)
    return found[0].module if found else None


def in_torch(materials: Materials, limit: float) -> str | None:
    """The module whose compression takes the output beyond `limit` (relative L2 to float), the
    modules before it compressed and those after it in float."""
    order = [m for m in materials.modules_in_order if f"{m}.weight" in materials.state.weights]
    places = list(range(len(order)))

    def bad(part: Sequence[int]) -> bool:
        twin = simulated(materials.folded_model, materials.state, only=set(order[: part[-1] + 1]))
        results = [trace.run(twin, b, materials.outputs) for b in materials.batches]
        return not materials.between(results, materials.float_traces).relative_l2 <= limit

    found = first_bad(places, bad)
    return None if found is None else order[found]
