"""Find the first bad module of a compressed state in a logarithmic number of runs.

    first_bad    the search, for any test of a part
    in_torch     -> the first module whose compression exceeds a limit
    passed_at    the same in words, for hop `compress`

Graphs need no search: each piece is judged alone (pieces/pieces.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from optimizer.compress.simulate import simulate_state
from optimizer.foundation.state import weight_name
from optimizer.validate.ledger import trace
from optimizer.validate.materials import Materials

T = TypeVar("T")


def find_first_bad(items: Sequence[T], bad: Callable[[Sequence[T]], bool]) -> T | None:
    """The first item with a fault; None where `bad` finds none among all.

    bad: test of consecutive items, called at most 1 + log2(len(items)) times: where the left half
        is clean, the fault is in the right one
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


def find_in_torch(materials: Materials, limit: float) -> str | None:
    """Name of the first module whose compression moves the output beyond `limit` (relative L2 to
    float), with later ones in float; None where no module does."""
    state = materials.state
    order = [
        m
        for m in materials.modules_in_order
        if weight_name(m) in state.weights or weight_name(m) in state.pruned_floats
    ]
    model = materials.float_model if state.pruned_floats else materials.folded_model
    places = list(range(len(order)))

    def bad(part: Sequence[int]) -> bool:
        twin = simulate_state(model, state, only=set(order[: part[-1] + 1]))
        results = [trace.run(twin, b, materials.outputs) for b in materials.batches]
        return not materials.output_distance(results, materials.float_traces).relative_l2 <= limit

    first = find_first_bad(places, bad)
    return None if first is None else order[first]


def describe_first_excess(materials: Materials, limit: float) -> str:
    """A sentence on the module at which a state exceeds `limit`."""
    module = find_in_torch(materials, limit)
    if module is None:
        return (
            "compressed modules alone stay within it; the inputs of residual adds, pooling, float "
            "activations or attention, which are integers, exceed it"
        )
    return f"compressing module by module, the limit is passed at {module}"
