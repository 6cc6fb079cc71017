"""Sparsity patterns of a weight matrix (out, in), per output:

    "2:4", "N:M"         at most N of every M neighbouring inputs, in stored order, are not zero
    "unstructured 0.5"   floor(0.5 * inputs) of all inputs are zero

The mask is not stored: a pruned weight is 0, and a pruned integer is the zero point.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

UNSTRUCTURED = "unstructured"
LARGEST = 32
"""Largest M of a pattern N:M."""
NEIGHBOURS = re.compile(r"([1-9][0-9]?):([1-9][0-9]?)")


@dataclass(frozen=True)
class Pattern:
    """Pattern of zeros in a weight matrix.

    kept, of: N and M of N:M; both 0 for an unstructured pattern
    amount: share of zeros in each row of an unstructured pattern
    """

    kept: int = 0
    of: int = 0
    amount: float = 0.0

    def __post_init__(self) -> None:
        if self.of:
            if not 0 < self.kept < self.of <= LARGEST:
                raise ValueError(
                    f"pattern {self.kept}:{self.of}: N of M are kept; accepted: 0 < N < M <= "
                    f"{LARGEST}, e.g. 2:4"
                )
        elif not 0 < self.amount < 1:
            raise ValueError(f"amount {self.amount}; accepted: more than 0 and less than 1")

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Build a pattern from its text, as str() gives it. Raises ValueError for any other
        text."""
        numbers = NEIGHBOURS.fullmatch(text)
        if numbers:
            return cls(kept=int(numbers[1]), of=int(numbers[2]))
        word, _, amount = text.partition(" ")
        try:
            if word == UNSTRUCTURED:
                return cls(amount=float(amount))
        except ValueError:
            pass
        raise ValueError(f'sparsity pattern {text!r}; accepted: "N:M" or "unstructured <amount>"')

    def __str__(self) -> str:
        return f"{self.kept}:{self.of}" if self.of else f"{UNSTRUCTURED} {self.amount:g}"

    @property
    def unit(self) -> int:
        """Inputs of one group N:M; 1 for an unstructured pattern."""
        return self.of or 1

    def divides(self, inputs: int) -> bool:
        """Return True where M divides `inputs`, and for every unstructured pattern."""
        return not self.of or inputs % self.of == 0

    def group(self, inputs: int) -> int:
        """Return the number of weights that are compared with each other: M, or for an unstructured
        pattern `inputs`."""
        return self.of or inputs

    def zeros(self, inputs: int) -> int:
        """Return the number of zeros in each group."""
        if self.of:
            return self.of - self.kept
        return math.floor(self.amount * inputs + 1e-9)

    def grouped(self, values: Tensor) -> Tensor:
        """Reshape values (out, in) to (out, groups, group). Raises ValueError unless M divides
        `in`."""
        out, inputs = values.shape
        if not self.divides(inputs):
            raise ValueError(f"pattern {self}: {self.of} does not divide {inputs} inputs")
        return values.reshape(out, -1, self.group(inputs))


def describe_violation(nonzero: Tensor, pattern: Pattern) -> str:
    """Describe the first group with too few zeros; "" where the matrix has the pattern.

    nonzero: (out, in) bool
    """
    if not pattern.divides(nonzero.shape[1]):
        return f"pattern {pattern}: {pattern.of} does not divide {nonzero.shape[1]} inputs"
    counts = pattern.grouped(nonzero).sum(-1)
    most = pattern.group(nonzero.shape[1]) - pattern.zeros(nonzero.shape[1])
    if bool((counts <= most).all()):
        return ""
    row, group = divmod(int((counts > most).int().argmax()), counts.shape[1])
    at = f"row {row}" + (f", inputs from {group * pattern.of}" if pattern.of else "")
    kept, of = int(counts[row, group]), pattern.group(nonzero.shape[1])
    return f"{kept} of {of} weights are kept at {at}; pattern {pattern} keeps {most}"
