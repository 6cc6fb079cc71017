"""What a change of precision may do to a result, derived rather than tuned: the rows that
tolerances.py takes its limits from.

A rounding moves a value by at most `unit` of itself: half the distance between neighbours at 1,
2^-p for p significant bits (Higham, Accuracy and Stability of Numerical Algorithms, 2.1). `count`
independent ones add up as a random walk, to unit x sqrt(count); Higham and Mary (2019) show that
sums stay inside it with high probability. `margin` covers what the walk leaves out: values that
nearly cancel, and the worst example rather than the typical one. So

    limit = unit x sqrt(count) x margin, to one digit

Integer codes are exact, and so are their sums. What is left is that the value a code was made from
was rounded first, and a value beside a tie then gets the next code: with `unit` u that happens to
a share 2 u m of the inputs (m: mean distance from zero in steps), each off by one step of the r
steps that the inputs' root mean square is. FLIP is that, sqrt(2 u m) / r.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

UNIT = {
    "fp32": 2.0**-24,
    "tf32": 2.0**-11,  # operands of products; sums and results are fp32
    "fp16": 2.0**-11,
    "bf16": 2.0**-8,
}
HIGHEST = {"int8": 127, "int4": 7}
"""The largest code of a symmetric type."""

MEAN_STEPS, RMS_STEPS = 25, 32
"""Of inputs coded to int8 with a range that just covers them: a normal value's absolute mean and
root mean square, in steps of 4 sigma / 127."""

FLIP = {name: sqrt(2 * unit * MEAN_STEPS) / RMS_STEPS for name, unit in UNIT.items()}
LENGTH = 4096  # of the sums in one linear module: the widest that recipes have


@dataclass(frozen=True)
class Pair:
    """One row. limit: relative L2, as declared. of: what is compared."""

    limit: float
    unit: float
    count: float
    margin: float
    of: str

    @property
    def derived(self) -> float:
        return self.unit * sqrt(self.count) * self.margin


MODULE = "one linear module, or the few operators between two, on the reference's own inputs"
MODEL = "a whole model"
OPERANDS = 3  # roundings: input, weight, result; the sum is fp32 and adds nothing beside them
PATH, COARSE_PATH = 4000, 400
"""Roundings along a path through the model; with 11 bits or fewer only those outside a sum, which
is kept in fp32."""

PAIRS: dict[tuple[str, str, str], Pair] = {
    ("fp32", "fp32", "piece"): Pair(2e-5, UNIT["fp32"], LENGTH, 5, MODULE),
    ("fp32", "fp32", "whole"): Pair(1e-5, UNIT["fp32"], PATH, 2.6, MODEL),
    ("fp32", "tf32", "piece"): Pair(3e-3, UNIT["tf32"], OPERANDS - 1, 5, MODULE),
    ("fp32", "tf32", "whole"): Pair(1e-2, UNIT["tf32"], COARSE_PATH, 1, MODEL),
    ("fp32", "fp16", "piece"): Pair(4e-3, UNIT["fp16"], OPERANDS, 5, MODULE),
    ("fp32", "fp16", "whole"): Pair(1e-2, UNIT["fp16"], COARSE_PATH, 1, MODEL),
    ("fp32", "bf16", "piece"): Pair(3e-2, UNIT["bf16"], OPERANDS, 5, MODULE),
    ("fp32", "bf16", "whole"): Pair(8e-2, UNIT["bf16"], COARSE_PATH, 1, MODEL),
    # Codes that are given: the same ones on both sides, made from values of the float type named.
    ("int8", "int8 fp32", "piece"): Pair(2e-4, FLIP["fp32"], 1, 4, MODULE),
    ("int8", "int8 fp16", "piece"): Pair(2e-2, FLIP["fp16"], 1, 4, MODULE),
    ("int8", "int8 bf16", "piece"): Pair(5e-2, FLIP["bf16"], 1, 4, MODULE),
    # Weights alone are codes: they are the same numbers, and only the float type rounds.
    ("int4", "int4 fp32", "piece"): Pair(2e-5, UNIT["fp32"], LENGTH, 5, MODULE),
    ("int4", "int4 fp16", "piece"): Pair(4e-3, UNIT["fp16"], OPERANDS, 5, MODULE),
    ("int4", "int4 fp16", "whole"): Pair(1e-2, UNIT["fp16"], COARSE_PATH, 1, MODEL),
    # MatMulNBits codes its float inputs to int8 in blocks of up to 128, whose largest value is at
    # most sqrt(128) of its root mean square.
    ("int4", "int4 int8", "piece"): Pair(
        5e-2, sqrt(128) / (HIGHEST["int8"] * sqrt(12)), 1, 2, MODULE
    ),
}


def limit(reference: str, candidate: str, of: str) -> float:
    """The declared limit of a row."""
    return PAIRS[reference, candidate, of].limit
