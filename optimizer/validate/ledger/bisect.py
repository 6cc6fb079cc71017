"""Name the first bad module of a compressed state, in a number of runs that grows with the
logarithm of the modules. (Of a graph every piece is judged by itself: pieces/pieces.py.)

first_bad       the search itself, over any question "is there a fault among these?"
in_torch        the first modules compressed and the others in float
passed_at       the same in words
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from optimizer.compress.simulate import simulated
from optimizer.foundation.state import weight_name
from optimizer.validate.ledger import trace
from optimizer.validate.materials import Materials

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


def in_torch(materials: Materials, limit: float) -> str | None:
    """The module whose compression takes the output beyond `limit` (relative L2 to float), the
    modules before it compressed and those after it in float."""
    state = materials.state
    order = [
        m
        for m in materials.modules_in_order
        if weight_name(m) in state.weights or weight_name(m) in state.pruned_floats
    ]
    whole = materials.float_model if state.pruned_floats else materials.folded_model
    places = list(range(len(order)))

    def bad(part: Sequence[int]) -> bool:
        twin = simulated(whole, state, only=set(order[: part[-1] + 1]))
        results = [trace.run(twin, b, materials.outputs) for b in materials.batches]
        return not materials.output_distance(results, materials.float_traces).relative_l2 <= limit

    first = first_bad(places, bad)
    return None if first is None else order[first]


def passed_at(materials: Materials, limit: float) -> str:
    """Where a state that is beyond `limit` passes it, in words."""
    module = in_torch(materials, limit)
    if module is None:
        return (
            "compressed modules alone keep it: it is passed by the integers that residual adds, "
            "pooling, float activations or attention read"
        )
    return f"compressing module by module, it is passed at {module}"
