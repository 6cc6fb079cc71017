"""Choose the targets of a bundle by targets[].on_fail, and describe the dropped ones.

refuse    no bundle unless this target's gates pass
drop      a bundle of the other targets, if all of their gates pass

A target with `drop` whose graph, model, engine or report a stage could not make has no gates; the
pipeline (pipeline.py) drops it by the same rule, and records the stage instead of a gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optimizer.foundation.verdicts import Verdict, worst
from optimizer.package.report.comparison import Document, sort_gates


def select_shipped(on_fail: Sequence[str], verdicts: Sequence[object]) -> tuple[bool, ...]:
    """Return one bool per target, True where the bundle includes the target: all but those with
    `drop` and a verdict other than "pass". If no target would be left, all are True."""
    kept = tuple(
        rule != "drop" or verdict == "pass" for rule, verdict in zip(on_fail, verdicts, strict=True)
    )
    return kept if any(kept) else (True,) * len(kept)


def judge_targets(on_fail: Sequence[str], verdicts: Sequence[object]) -> Verdict:
    """Return the verdict of a run: the worst among the targets that belong to the bundle."""
    kept = select_shipped(on_fail, verdicts)
    return worst(v for v, keep in zip(verdicts, kept, strict=True) if keep)


def mark_dropped(on_fail: Sequence[str], reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return copies of the reports with "dropped": True where the bundle lacks the target."""
    kept = select_shipped(on_fail, [r["verdict"] for r in reports])
    return [{**r, "dropped": not keep} for r, keep in zip(reports, kept, strict=True)]


def describe_dropped(names: Sequence[str], reports: Sequence[Document]) -> list[dict[str, str]]:
    """Return {target, gate, message} of each dropped target, with the first of gates_in_order.

    names: name of each report's target, such as "onnxruntime-cpu"
    reports: as returned by `mark_dropped`
    """
    rows = []
    for name, report in zip(names, reports, strict=True):
        if not report["dropped"]:
            continue
        gate = next(iter(sort_gates(report)), {})
        rows.append(
            {
                "target": name,
                "gate": str(gate.get("name", "")),
                "message": str(gate.get("message", "")),
            }
        )
    return rows
