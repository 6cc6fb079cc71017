"""Choose the optimization profile of an engine for some input shapes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ...errors import InputError

Shape = tuple[int, ...]
Range = tuple[Shape, Shape, Shape]  # min, opt, max of each axis
Profile = Mapping[str, Range]


def choose(profiles: Sequence[Profile], shapes: Mapping[str, Shape]) -> int:
    """Choose the engine's optimization profile for a batch: return the index of the one that
    accepts `shapes` and is tuned for the nearest sizes.

    profiles: {input: {"min", "opt", "max"}} per profile
    shapes: {input: shape}

    Kernels of a profile are tuned for its opt shapes. Ties go to the first profile. Raises
    InputError if no profile accepts the shapes, naming an input and its range in the profile that
    accepts most inputs.
    """
    misses = [_list_misses(profile, shapes) for profile in profiles]
    fitting = [i for i, missed in enumerate(misses) if not missed]
    if fitting:
        return min(fitting, key=lambda i: _distance(profiles[i], shapes))
    nearest = min(range(len(profiles)), key=lambda i: len(misses[i]))
    name, axis = misses[nearest][0]
    shape, ranges = shapes[name], profiles[nearest][name]
    if len(shape) != len(ranges[0]):
        raise InputError(
            f"shape {list(shape)} was given", where=f"input {name}", accepted=_format_ranges(ranges)
        )
    several = f" (profile {nearest} of {len(profiles)})" if len(profiles) > 1 else ""
    raise InputError(
        f"axis {axis} is {shape[axis]} in shape {list(shape)}",
        where=f"input {name}",
        accepted=f"{ranges[0][axis]} to {ranges[2][axis]}{several}",
        fix="Split the request, or build the engine with a wider range of shapes.",
    )


def _list_misses(profile: Profile, shapes: Mapping[str, Shape]) -> list[tuple[str, int]]:
    """List the sizes of a batch that lie outside an optimization profile, as (input, axis)."""
    misses = []
    for name, shape in shapes.items():
        low, _, high = profile[name]
        if len(shape) != len(low):
            misses.append((name, 0))
            continue
        misses += [
            (name, axis) for axis, size in enumerate(shape) if not low[axis] <= size <= high[axis]
        ]
    return misses


def _distance(profile: Profile, shapes: Mapping[str, Shape]) -> float:
    """Measure how far a batch's sizes are from those that a TensorRT engine's profile is optimized
    for: the sum of absolute logarithms of the ratios."""
    return sum(
        abs(math.log((size + 1) / (middle + 1)))  # +1: an axis may be empty
        for name, shape in shapes.items()
        for size, middle in zip(shape, profile[name][1], strict=True)
    )


def _format_ranges(ranges: Range) -> str:
    low, _, high = ranges
    return str([a if a == b else f"{a} to {b}" for a, b in zip(low, high, strict=True)])
