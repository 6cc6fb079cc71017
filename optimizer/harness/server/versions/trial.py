"""Does a new version answer as the old one does? Decided while requests come; pure.

Each example is a request that both answered: alike, or not. The new version passes once "a share
of `margin` or more of all requests get another answer" is rejected, and fails once "less than that"
is, by the exact paired test of the gates (paired_test.py) in which the old answer counts as right.
It is looked at after 32, 64, 128 ... examples, and look k may err in alpha / 2^k, so that all looks
together err in at most alpha = 1 - confidence, however long it takes (a law in the tests).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .paired_test import Verdict, exact_verdict

FIRST = 32  # examples before the first look; each look comes after twice as many
MOST = 1 << 14  # examples, after which a trial that does not decide ends


@dataclass(frozen=True)
class Terms:
    """margin: the share of requests that may get another answer. cosine: of two embeddings that
    count as one answer, at least."""

    margin: float
    confidence: float
    cosine: float


class Trial:
    """See the module."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.examples = self.differing = 0
        self.verdict: Verdict = "inconclusive"

    @property
    def over(self) -> bool:
        """Decided, or never to be."""
        return self.verdict != "inconclusive" or self.examples >= MOST

    def add(self, differs: bool) -> bool:
        """One more example, and whether it ended the trial; later ones do not count. To look at the
        last of them takes some tens of milliseconds."""
        if self.over:
            return False
        self.examples += 1
        self.differing += differs
        many = self.examples // FIRST
        if self.examples % FIRST or many & (many - 1):
            return self.over
        alpha = level(many.bit_length(), self.terms.confidence)
        self.verdict = exact_verdict(self.differing, 0, self.examples, self.terms.margin, alpha)
        return self.over


def level(look: int, confidence: float) -> float:
    """In how much look 1, 2, 3 ... may err."""
    return float((1 - confidence) / 2**look)


def differs(old: Mapping[str, Any], new: Mapping[str, Any], cosine: float) -> bool:
    """Whether two answers to one input are not one answer. Labels count without their scores,
    embeddings by their cosine; anything else is to be the same."""
    for field, value in old.items():
        if field == "score" and "label" in old:
            continue
        other = new.get(field)
        if field == "embedding" and other is not None:
            if len(value) != len(other) or _cosine(value, other) < cosine:
                return True
        elif value != other:
            return True
    return old.keys() != new.keys()


def _cosine(one: Any, other: Any) -> float:
    a, b = np.asarray(one, np.float64), np.asarray(other, np.float64)
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / size if size else float(np.array_equal(a, b))
