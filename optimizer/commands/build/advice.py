"""Suggest next steps after a run whose gates did not all pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optimizer.package.report.cards import generation
from optimizer.package.report.comparison import get_part, get_parts

Report = Mapping[str, Any]

TIMED = (
    "repeat the timing where nothing else runs: the same command with --remeasure, and with the "
    "max_seconds of the line above if it names one"
)
SMALL = "or, if a smaller file is the goal: --set validate.latency.must_beat_float=false"
NEAR = (
    "raise validate.max_drop if you accept that loss, or use a method that loses less: "
    "docs/tutorial.md, section 5"
)
FAILED = "change the recipe as docs/tutorial.md, section 5, says of each gate, and run it again"


def list_next_steps(reports: Sequence[Report]) -> list[str]:
    """List for `optimize run` a sentence per thing to do, for the gates that did not pass."""
    steps: dict[str, None] = {}
    for report in reports:
        for gate in get_parts(report, "gates"):
            name, verdict = str(gate.get("name")), str(gate.get("verdict"))
            if step := _step(report, name, verdict):
                steps[step] = None
            if (name, verdict) == ("speed.must_beat_float", "inconclusive"):
                steps[SMALL] = None
    return list(steps)


def _step(report: Report, name: str, verdict: str) -> str:
    if verdict == "fail":
        return FAILED
    if verdict != "inconclusive":
        return ""
    if name.startswith("speed."):
        return TIMED
    quality = get_part(report, "quality")
    needed, examples = quality.get("needed"), quality.get("examples")
    if not name.startswith("quality.") or examples is None:
        return ""
    if not needed or needed <= examples:
        return NEAR
    rows = (
        "texts, for about {} more windows" if generation.is_generation(report) else "about {} rows"
    )
    return (
        f"add {rows.format(f'{needed - examples:,}')} to the data of validate ({examples:,} of "
        f"about {needed:,} are there), and run the same command: finished steps are reused"
    )
