"""Check, before any trial, that the rows suffice to pass a candidate that loses nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from optimizer.data.datasets import Sample
from optimizer.foundation.errors import DataError
from optimizer.harness import tasks
from optimizer.recipe.stage_sections import Validation
from optimizer.search import sequential
from optimizer.search.stages.answered import probe_rows, read_baseline, read_rows
from optimizer.search.stages.judging import cut_held_out
from optimizer.search.stages.split import Part, select_rows
from optimizer.validate.quality import quality, significance
from optimizer.validate.quality.significance import Decision
from optimizer.validate.run_artifacts import RunArtifacts

PARTS: tuple[Part, ...] = ("search", "held_out")


def count(section: Validation, margin: float, base: Path, answered: Path) -> dict[str, int]:
    """Count the rows by which a search judges candidates: {part: number of its rows; of
    text-generation, of its windows}.

    section: section of the recipe's validation
    margin: largest drop allowed
    base, answered: folders of load and of stage `answered`

    Raises DataError where a part is too small for a candidate that answers as the float model does
    to pass as the recipe itself.
    """
    level = sequential.confirmation_error(1 - section.validate_.confidence, 0)
    every, train = read_rows(section, base)
    m = RunArtifacts(section, base, base, base, base, base)
    task = tasks.look_up(m.contract)

    def unchanged(rows: list[Sample]) -> Decision:
        """Decide about a candidate with the float model's answers."""
        if task.generates:
            drops = np.zeros(len(cut_held_out(m, rows)))
            return significance.decide_by_mean(drops, margin, 1 - level)
        own, fit_on = read_baseline(answered, every, rows), probe_rows(answered, train)
        name = section.validate_.metric
        metric = quality.compare(name, rows, own, own, fit_on, 1 - level)
        return quality.judge(name, metric, len(rows), margin, 1 - level, None)[0]

    counts: dict[str, int] = {}
    for part in PARTS:
        rows = select_rows(part, every, task)
        if not rows:
            raise _too_few(len(every), "rows", 0, None)
        decided = unchanged(rows)
        counts[part] = decided.examples if task.generates else len(rows)
        if decided.verdict != "pass":
            what = "windows" if task.generates else "rows"
            whole = 2 * decided.examples if task.generates else len(every)
            raise _too_few(whole, what, decided.examples, decided.needed)
    return counts


def _too_few(whole: int, what: str, part: int, needed: int | None) -> DataError:
    more = f"about {2 * needed:,} {what}" if needed else f"more {what}, of different texts"
    return DataError(
        f"{whole:,} {what}; a search judges its winner on half of them ({part:,}), which are too "
        "few to pass even a model that answers as the float model does",
        where="validate.data",
        accepted=more,
        fix="Add rows, or allow a larger drop (search.constraints: {quality.max_drop: ...}).",
    )
