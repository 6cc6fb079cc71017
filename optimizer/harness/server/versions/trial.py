"""Sequential test of a new version: does it answer as the old one does? Pure.

Each example is a request that both versions answered, alike or differently. The new version passes
once "a share of `margin` or more of all requests get another answer" is rejected, and fails once
"less than that" is. The test is the gates' exact paired one (paired_test.py), with the old answers
as labels. It runs after 32, 64, 128 ... examples; look k may err with probability alpha / 2^k, so
that all looks together err with at most alpha = 1 - confidence (a law in the tests). Fed by
mirror.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .paired_test import Verdict, judge_exactly

FIRST = 32  # examples before the first look; their number doubles with each look
MOST = 1 << 14  # examples after which an undecided trial ends


@dataclass(frozen=True)
class Terms:
    """Terms of a trial of a model's new version on a server.

    margin: share of requests that may get another answer
    confidence: 1 - the maximum probability of a wrong verdict
    cosine: least cosine of two embeddings that count as the same answer
    """

    margin: float
    confidence: float
    cosine: float


class VersionTrial:
    """Test of a new version on the server while examples arrive; `verdict` is "inconclusive" until
    decided."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.examples = self.differing = 0
        self.verdict: Verdict = "inconclusive"

    @property
    def over(self) -> bool:
        """Return True once the trial of a new version is decided, or has seen MOST examples."""
        return self.verdict != "inconclusive" or self.examples >= MOST

    def add(self, differs: bool) -> bool:
        """Count a request whose two answers agree or differ; returns True if this ended the trial.
        Later requests do not count. The last look takes tens of milliseconds."""
        if self.over:
            return False
        self.examples += 1
        self.differing += differs
        many = self.examples // FIRST
        if self.examples % FIRST or many & (many - 1):
            return self.over
        alpha = allowed_error(many.bit_length(), self.terms.confidence)
        self.verdict = judge_exactly(self.differing, 0, self.examples, self.terms.margin, alpha)
        return self.over


def allowed_error(look: int, confidence: float) -> float:
    """Return the error probability that the trial of a version may spend at look 1, 2, 3 ..."""
    return float((1 - confidence) / 2**look)


def answers_differ(old: Mapping[str, Any], new: Mapping[str, Any], cosine: float) -> bool:
    """Return True if a model's two versions answer one input differently.

    cosine: least cosine of embeddings that count as the same

    Labels are compared without their scores, embeddings by cosine, other fields for equality.
    """
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
