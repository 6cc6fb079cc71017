"""Verdicts (pass, inconclusive, fail) of gates, targets and runs, and their combination."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from optimizer.foundation.errors import OptimizeError

Verdict = Literal["pass", "fail", "inconclusive"]


def worst(verdicts: Iterable[object]) -> Verdict:
    """Return the worst of several verdicts: fail (an unknown verdict counts as fail), then
    inconclusive, then pass.

    Raises OptimizeError for an empty list, because a run in which nothing was judged has not
    passed.
    """
    distinct = set(verdicts)
    if not distinct:
        raise OptimizeError("no verdicts were given, so nothing was judged")
    if distinct <= {"pass"}:
        return "pass"
    return "inconclusive" if distinct <= {"pass", "inconclusive"} else "fail"
