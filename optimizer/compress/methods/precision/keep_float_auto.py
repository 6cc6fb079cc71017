"""Which modules stay float, so that quantizing the others moves the output by no more than asked.

A module's sensitivity is how far quantizing it alone moves the output. Errors of modules do not
simply add up, so that they only give the order: the least sensitive are quantized, and how many
may be is found by measuring them together, in log2 of the number of modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


class RelativeError:
    """Accumulates |y - yq| / |y| (L2) over outputs."""

    def __init__(self) -> None:
        self._moved = self._size = 0.0

    def update(self, float_output: Tensor, output: Tensor) -> None:
        """Both of one shape."""
        self._moved += float((output.double() - float_output.double()).square().sum())
        self._size += float(float_output.double().square().sum())

    @property
    def value(self) -> float:
        """0 where both are nothing."""
        if not self._size:
            return math.inf if self._moved else 0.0
        return math.sqrt(self._moved / self._size)


@dataclass(frozen=True)
class Kept:
    """modules: those that stay float, the most sensitive first. error: what quantizing the others
    moves the output by; before: what quantizing all does."""

    modules: tuple[str, ...]
    error: float
    before: float


def most_sensitive(
    errors: Mapping[str, float], measure: Callable[[Sequence[str]], float], most: float
) -> Kept:
    """The fewest of the most sensitive modules without which the error is at most `most`.

    errors: {module: the error of quantizing it alone}; measure(modules): of quantizing those. It is
    taken to fall as more stay float; where it does not, as many stay float as meet `most`. All of
    them do: nothing quantized is no error.
    """
    order = sorted(errors, key=lambda name: (-errors[name], name))
    before = measure(order)
    if before <= most:
        return Kept((), before, before)
    few, enough, error = 0, len(order), 0.0  # so many are too few, so many are enough
    while enough - few > 1:
        middle = (few + enough) // 2
        measured = measure(order[middle:])
        if measured <= most:
            enough, error = middle, measured
        else:
            few = middle
    return Kept(tuple(order[:enough]), error, before)
