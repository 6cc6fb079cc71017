"""Find the first bad module of a compressed state in a logarithmic number of runs.

    find_first_bad           the search, for any test of consecutive items
    find_in_torch            the first module whose compression exceeds a limit
    describe_first_excess    the same as a sentence, for hop `compress`

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
    """Bisect a failed hop: return the first item with a fault; None where `bad` returns False for
    all items together.

    bad: test of consecutive items, called at most 1 + log2(len(items)) times: where the left half
        passes, the fault is in the right one
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
    """Return the name of the first module m such that compressing all modules up to m, with later
    ones in float, moves the output beyond the limit; None where no module does.

    limit: relative L2 distance to the float model's output
    """
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
    """Write a sentence that names the module at which a compressed state exceeds `limit`, a
    relative L2 distance to the float model's output."""
    module = find_in_torch(materials, limit)
    if module is None:
        return (
            "compressed modules alone stay within it; the inputs of residual adds, pooling, float "
            "activations or attention, which are integers, exceed it"
        )
    return f"compressing module by module, the limit is passed at {module}"
