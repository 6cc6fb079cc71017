"""Print a measured number and its limit so that a reader sees which is larger; and the words by
which `optimize explain` recognizes the kind of a limit."""

from __future__ import annotations

import math

CORRECT_RUNS = (
    "is the limit that correct runs set"  # ends the message of a limit measured in the run
)
BUDGET = "quantization moves the output by"  # begins that of the recipe's budget
FEWEST_DIGITS = 2
ROUNDED = 12  # digits that hide the rounding of 1 - 0.31
WRITTEN_DIGITS = 8  # at most, of a number that comes from a recipe, not from arithmetic
MOST_DIGITS = 17  # distinguish any two 64-bit floats (IEEE 754, section 5.12.2)


def write_breach(measured: float, limit: float) -> tuple[str, str]:
    """(measured, limit) as text, with the fewest significant digits (at least 2) that keep their
    order: ("0.0618", "0.0617"), never ("6.2e-02", "6.2e-02") for different numbers. A limit from a
    recipe has all its digits: 0.995, never 0.99.

    Equal numbers, and a pair with a NaN, have no order and get 2 digits.
    """
    pair = float(measured), float(limit)
    for digits in range(_fewest(pair[1]), MOST_DIGITS + 1):
        printed = _printed(pair[0], digits), _printed(pair[1], digits)
        if _order(float(printed[0]), float(printed[1])) == _order(*pair):
            return printed
    raise AssertionError(f"{MOST_DIGITS} digits do not tell {pair} apart")


def _fewest(limit: float) -> int:
    digits = f"{limit:.{ROUNDED - 1}e}".lstrip("-").partition("e")[0].replace(".", "")
    written = len(digits.rstrip("0")) if math.isfinite(limit) else 0
    return max(FEWEST_DIGITS, written) if written <= WRITTEN_DIGITS else FEWEST_DIGITS


def _printed(value: float, digits: int) -> str:
    return f"{value:#.{digits}g}".removesuffix(".") if math.isfinite(value) else str(value)


def _order(a: float, b: float) -> int:
    return (a > b) - (a < b)
