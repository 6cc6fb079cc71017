"""Every example of every output held to a limit of its own.

A decoder answers logits and a cache for each of its layers, and quantization moves these by very
different amounts: of SmolLM2 in 8 bits the logits by 0.06, the values that its last layer keeps of
one text by 0.11. Held to one mean of all, the second fails without a fault, or a fault of the first
passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from optimizer.validate.distance import NOWHERE, Distance, distance
from optimizer.validate.materials import Materials
from optimizer.validate.tolerances import Tolerance
from optimizer.validate.trace import Trace


def judged(
    m: Materials,
    found: Sequence[dict[str, Any]],
    expected: Sequence[Trace],
    tolerance: Tolerance,
) -> tuple[float, Distance]:
    """(limit, distance) of what a graph gave to all that graphs are asked; the limit and `worst`
    are those of the example that comes nearest to its own limit, or lies furthest beyond it.

    That limit is tolerance.at(the example's own quantization error, or the error of its output
    over all examples where that is larger: where an output is a few numbers, one example's may be
    small by chance).
    """
    measured = m.between(found, expected, m.compared)
    if not tolerance.share or measured.worst == NOWHERE:
        return tolerance.limit, measured
    nearest = (0.0, tolerance.limit)
    for name in m.compared:
        every = m.errors[name]
        pairs = (
            pair
            for got, wanted in zip(found, expected, strict=True)
            for pair in wanted.pairs(got[name], wanted.result[name])
        )
        for pair, own in zip(pairs, every.examples, strict=True):
            far = distance([pair]).worst, tolerance.at(max(own, every.whole))
            nearest = max(nearest, far, key=lambda f: f[0] / f[1])
    return nearest[1], replace(measured, worst=nearest[0])
