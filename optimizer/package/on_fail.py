"""targets[].on_fail: which targets a bundle is made of, and what is said of the others.

refuse    no bundle unless this target's gates pass
drop      the bundle is made of the others, when all of theirs pass

A target of `drop` whose graph, model, engine or report a stage could not make has no gates: the
pipeline leaves it out by the same rule (pipeline.py), with the stage in the place of the gate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optimizer.foundation.verdicts import Verdict, worst
from optimizer.package.report.comparison import Document, gates_in_order


def shipped(on_fail: Sequence[str], verdicts: Sequence[object]) -> tuple[bool, ...]:
    """Whether each target belongs to the bundle: all do but those of `drop` whose gates did not
    pass. When that is every target none is dropped: there would be no bundle to drop it from."""
    kept = tuple(
        rule != "drop" or verdict == "pass" for rule, verdict in zip(on_fail, verdicts, strict=True)
    )
    return kept if any(kept) else (True,) * len(kept)


def verdict(on_fail: Sequence[str], verdicts: Sequence[object]) -> Verdict:
    """Of a run: the worst of the targets that belong to the bundle."""
    kept = shipped(on_fail, verdicts)
    return worst(v for v, keep in zip(verdicts, kept, strict=True) if keep)


def marked(on_fail: Sequence[str], reports: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The reports, each with "dropped": whether the bundle was made without its target."""
    kept = shipped(on_fail, [r["verdict"] for r in reports])
    return [{**r, "dropped": not keep} for r, keep in zip(reports, kept, strict=True)]


def dropped(names: Sequence[str], reports: Sequence[Document]) -> list[dict[str, str]]:
    """[{target, gate, message}] of each target left out: its worst gate, the first of them. names:
    the targets' in the bundle; reports: `marked`."""
    rows = []
    for name, report in zip(names, reports, strict=True):
        if not report["dropped"]:
            continue
        gate = next(iter(gates_in_order(report)), {})
        rows.append(
            {
                "target": name,
                "gate": str(gate.get("name", "")),
                "message": str(gate.get("message", "")),
            }
        )
    return rows
