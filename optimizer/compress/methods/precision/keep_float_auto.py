"""Choose modules that stay float, so that quantizing the others moves the output within a limit.

A module's sensitivity is the change of the output when it alone is quantized. Errors do not simply
add up, so sensitivities only give the order: the least sensitive modules are quantized, and their
number is found by bisection, measuring them together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor


class RelativeError:
    """Running relative error |y - yq| / |y| (L2) of a quantized model's outputs yq to the float
    outputs y, by which keep_float_auto chooses modules."""

    def __init__(self) -> None:
        self._moved = self._size = 0.0

    def update(self, float_output: Tensor, output: Tensor) -> None:
        """Add a pair of outputs, float and quantized, of equal shape."""
        self._moved += float((output.double() - float_output.double()).square().sum())
        self._size += float(float_output.double().square().sum())

    @property
    def value(self) -> float:
        """The relative error; 0 where all outputs are 0, infinite where only float outputs are."""
        if not self._size:
            return math.inf if self._moved else 0.0
        return math.sqrt(self._moved / self._size)


@dataclass(frozen=True)
class FloatModules:
    """The modules that keep_float_auto leaves float, most sensitive first.

    error: change of the output when the others are quantized
    before: change of the output when all are quantized
    """

    modules: tuple[str, ...]
    error: float
    before: float


def choose_float_modules(
    errors: Mapping[str, float], measure: Callable[[Sequence[str]], float], max_error: float
) -> FloatModules:
    """Choose the fewest of the most sensitive modules to keep in float, so that the error of the
    others together is at most `max_error`.

    errors: {module: error of quantizing it alone}
    measure: (modules) -> error of quantizing these together

    The error is taken to fall as more modules stay float. If it does not, the result still meets
    `max_error`: with nothing quantized the error is 0.
    """
    order = sorted(errors, key=lambda name: (-errors[name], name))
    before = measure(order)
    if before <= max_error:
        return FloatModules((), before, before)
    few, enough, error = 0, len(order), 0.0  # numbers of float modules: too few, enough
    while enough - few > 1:
        middle = (few + enough) // 2
        measured = measure(order[middle:])
        if measured <= max_error:
            enough, error = middle, measured
        else:
            few = middle
    return FloatModules(tuple(order[:enough]), error, before)
