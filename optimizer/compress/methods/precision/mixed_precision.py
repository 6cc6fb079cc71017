"""Which of several ways of storing it each module gets, under limits on the size of files.

A menu lists what a module may get: what each option is predicted to cost, and the bytes it takes
in each of the files. Choose one option of every menu so that the sum of costs is small and no
file exceeds its limit: a multiple-choice knapsack. Its relaxation is solved by walking the lower
convex hulls of (bytes, cost), steepest step first (Sinha and Zoltners 1979, Operations Research
27, 503-515), and the walk ends before the first step that does not fit. So for one file

    cost(chosen) <= least cost possible + what the step that did not fit would have saved

and since the chain of steps does not depend on the limits, more room never costs more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from optimizer.foundation.qtensor import Scheme


@dataclass(frozen=True)
class Option:
    """cost: what is predicted to be lost; sizes: bytes, one number per file."""

    cost: float
    sizes: tuple[int, ...]


def stored_sizes(scheme: Scheme, out: int, inputs: int) -> tuple[int, int]:
    """Bytes of a weight (out, inputs) in the files that are shipped, in the two forms they have:

    0. the state (optimizer/foundation/state.py), and an ONNX graph in fp32: scales of 32 bits
    1. an ONNX graph in fp16 (lower/onnx/qdq.py), a folder in fp16 or bf16: scales of 16 bits

    3 bits are stored as 4, as the state and every ONNX file do. A zero point has a byte in the
    first, and the bits of a code in the second.
    """
    bits = 8 if scheme.bits == 8 else 4
    codes = out * -(-inputs * bits // 8)
    scales = 1 if scheme.granularity == "tensor" else out * scheme.groups(inputs)
    zeros = 0 if scheme.symmetric else scales
    return codes + 4 * scales + zeros, codes + 2 * scales + -(-zeros * bits // 8)


def choose(menus: Mapping[str, Sequence[Option]], limits: Sequence[int]) -> dict[str, int]:
    """{name: index into its menu}. limits: bytes, one number per file.

    Every option and limits must speak of the same files. Raises ValueError when not even the
    smallest options fit.
    """
    files = range(len(limits))
    choices = [c for f in files if (c := _walked(menus, limits, f)) is not None]
    if not choices:
        least = [sum(min(o.sizes[f] for o in m) for m in menus.values()) for f in files]
        raise ValueError(f"limits: {list(limits)} bytes; the smallest options take {least}")
    return min(choices, key=lambda chosen: total(menus, chosen)[0])


def total(
    menus: Mapping[str, Sequence[Option]], chosen: Mapping[str, int]
) -> tuple[float, tuple[int, ...]]:
    """The cost of a choice, and its bytes in each file."""
    options = [menus[name][i] for name, i in chosen.items()]
    sizes = zip(*(o.sizes for o in options), strict=True)
    return sum(o.cost for o in options), tuple(map(sum, sizes))


def _walked(
    menus: Mapping[str, Sequence[Option]], limits: Sequence[int], file: int
) -> dict[str, int] | None:
    """The walk by the bytes of one file; None when its start does not fit all of them."""
    hulls = {name: _hull(menu, file) for name, menu in menus.items()}
    chosen = {name: hull[0] for name, hull in hulls.items()}
    taken = list(total(menus, chosen)[1])
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
    """The options that some price of a byte makes the best, smallest first."""
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
    """What one more byte saves from option a to option b; equal sizes are not on one hull."""
    return (menu[a].cost - menu[b].cost) / (menu[b].sizes[file] - menu[a].sizes[file])
