"""Verdict of a gate, a target or a run, and the verdict of several."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from optimizer.foundation.errors import OptimizeError

Verdict = Literal["pass", "fail", "inconclusive"]


def worst(verdicts: Iterable[object]) -> Verdict:
    """The worst of several verdicts: fail (an unknown verdict too), then inconclusive, then pass.

    Raises OptimizeError for no verdicts: nothing judged is not a pass.
    """
    distinct = set(verdicts)
    if not distinct:
        raise OptimizeError("no verdicts were given, so nothing was judged")
    if distinct <= {"pass"}:
        return "pass"
    return "inconclusive" if distinct <= {"pass", "inconclusive"} else "fail"
