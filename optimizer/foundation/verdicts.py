"""What a gate, a target and a run come to, and what several come to together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from optimizer.foundation.errors import OptimizeError

Verdict = Literal["pass", "fail", "inconclusive"]


def worst(verdicts: Iterable[object]) -> Verdict:
    """The verdict of several taken together: one that is unknown counts as a failure.

    Raises OptimizeError for none at all: nothing judged is not a pass.
    """
    distinct = set(verdicts)
    if not distinct:
        raise OptimizeError("there is no verdict to take the worst of")
    if distinct <= {"pass"}:
        return "pass"
    return "inconclusive" if distinct <= {"pass", "inconclusive"} else "fail"
