"""Choose a storage format for each module under limits on file sizes, a multiple-choice knapsack.

A menu lists the options of a module: the predicted cost of each, and its bytes in each file. Choose
one option of every menu so that the sum of costs is small and no file exceeds its limit. The
relaxation is solved by walking the lower convex hulls of (bytes, cost), steepest step first (Sinha
and Zoltners 1979, Operations Research 27, 503-515), up to the first step that does not fit. So for
one file

    cost(chosen) <= least cost possible + cost saved by the step that did not fit

and since the chain of steps does not depend on the limits, larger limits never cost more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from optimizer.foundation.qtensor import Scheme


@dataclass(frozen=True)
class Option:
    """One scheme that a module may get: its predicted cost, and its sizes in bytes, one per file
    that holds the weight."""

    cost: float
    sizes: tuple[int, ...]


def compute_stored_sizes(scheme: Scheme, out: int, inputs: int) -> tuple[int, int]:
    """Compute the bytes of a weight (out, inputs) in the two kinds of shipped file:

    0. the state (optimizer/foundation/state.py), and an ONNX graph in fp32: scales of 32 bits
    1. an ONNX graph in fp16 (lower/onnx/qdq.py), a folder in fp16 or bf16: scales of 16 bits

    3 bits are stored as 4. A zero point takes a byte in the first, and the bits of an integer in
    the second.
    """
    bits = 8 if scheme.bits == 8 else 4
    integers = out * -(-inputs * bits // 8)
    scales = 1 if scheme.granularity == "tensor" else out * scheme.groups(inputs)
    zeros = 0 if scheme.symmetric else scales
    return integers + 4 * scales + zeros, integers + 2 * scales + -(-zeros * bits // 8)


def choose(menus: Mapping[str, Sequence[Option]], limits: Sequence[int]) -> dict[str, int]:
    """Choose a scheme (option) of every module's menu, so that the files fit their limits at the
    least summed cost that is found; returns {name: index into its menu}.

    limits: bytes, one number per file, in the order of Option.sizes

    Raises ValueError when the smallest options exceed a limit.
    """
    files = range(len(limits))
    choices = [c for f in files if (c := _walk_hulls(menus, limits, f)) is not None]
    if not choices:
        least = [sum(min(o.sizes[f] for o in m) for m in menus.values()) for f in files]
        raise ValueError(f"limits: {list(limits)} bytes; the smallest options take {least}")
    return min(choices, key=lambda chosen: sum_choices(menus, chosen)[0])


def sum_choices(
    menus: Mapping[str, Sequence[Option]], chosen: Mapping[str, int]
) -> tuple[float, tuple[int, ...]]:
    """Sum up a choice of one option per module: its cost, and its bytes in each file."""
    options = [menus[name][i] for name, i in chosen.items()]
    sizes = zip(*(o.sizes for o in options), strict=True)
    return sum(o.cost for o in options), tuple(map(sum, sizes))


def _walk_hulls(
    menus: Mapping[str, Sequence[Option]], limits: Sequence[int], file: int
) -> dict[str, int] | None:
    """Choose a scheme per module's menu: start with the smallest, and take the steps that save most
    cost per byte of one file, until a file would exceed its limit. Returns {name: index}; None when
    the start exceeds a limit."""
    hulls = {name: _hull(menu, file) for name, menu in menus.items()}
    chosen = {name: hull[0] for name, hull in hulls.items()}
    taken = list(sum_choices(menus, chosen)[1])
    if any(t > limit for t, limit in zip(taken, limits, strict=True)):
        return None
    steps = [
        (-_slope(menus[name], a, b, file), name, a, b)
        for name, hull in hulls.items()
        for a, b in pairwise(hull)
    ]
    for _, name, a, b in sorted(steps, key=lambda step: step[0]):
        old, new = menus[name][a].sizes, menus[name][b].sizes
        after = [t - o + n for t, o, n in zip(taken, old, new, strict=True)]
        if any(t > limit for t, limit in zip(after, limits, strict=True)):
            break
        taken, chosen[name] = after, b
    return chosen


def _hull(menu: Sequence[Option], file: int) -> list[int]:
    """Return the schemes in a module's menu that save most cost per byte: indices on the lower
    convex hull of (bytes, cost), smallest first."""
    order = sorted(range(len(menu)), key=lambda i: (menu[i].sizes[file], menu[i].cost, i))
    hull: list[int] = []
    for i in order:
        if hull and menu[i].cost >= menu[hull[-1]].cost:
            continue
        while len(hull) > 1 and _slope(menu, hull[-2], hull[-1], file) <= _slope(
            menu, hull[-1], i, file
        ):
            hull.pop()
        hull.append(i)
    return hull


def _slope(menu: Sequence[Option], a: int, b: int, file: int) -> float:
    """Compute the cost of quantization saved per byte from scheme a to scheme b; options on a hull
    differ in size."""
    return (menu[a].cost - menu[b].cost) / (menu[b].sizes[file] - menu[a].sizes[file])
