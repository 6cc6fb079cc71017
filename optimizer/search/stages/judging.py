"""Stage `judged`: answer rows with one form of the model, and test its drop against the margins.

Rows of the search are answered look by look (search/sequential.py), until a margin is surely
missed; held-out rows are answered at once. The gates are those of the recipe on validate.data: the
metric, and the mean cosine where the recipe has min_cosine.

out/judged.json   verdict     pass | fail | inconclusive, of all gates at the last look
                  rows, of    rows answered, rows of the part
                  alpha       level of the last look
                  quality     section of the report (validate/quality/quality.py)
                  gates       [{name, verdict, message, ...}] at the last look
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from optimizer import targets
from optimizer.data.datasets import Sample
from optimizer.foundation.errors import MachineError
from optimizer.foundation.verdicts import Verdict
from optimizer.harness import tasks
from optimizer.harness.runtimes.machine import this_machine
from optimizer.search import sequential
from optimizer.search.sequential import Look
from optimizer.search.stages import answered
from optimizer.search.stages.sections import Judging
from optimizer.search.stages.split import rows_of
from optimizer.store import Artifacts, Stage
from optimizer.validate import gates, target_runner
from optimizer.validate.quality import answers
from optimizer.validate.quality.quality import Answers
from optimizer.validate.run_artifacts import RunArtifacts
from optimizer.validate.stage import compare, one_torch_thread

FILE = "judged.json"


def run(section: Judging, reference: Path, artifacts: Artifacts[Path], out: Path) -> None:
    """Judge the form in `artifacts`. reference: folder of `answered`.

    Raises MachineError where nothing on this machine answers for the target."""
    folders = (artifacts.base, artifacts.state, artifacts.graph, artifacts.model, artifacts.engine)
    m = RunArtifacts(section.validation, *folders, scratch=out)
    if why := target_runner.why_not_answered(m):
        raise MachineError(why, where=f"target {section.validation.target.name}")
    every, train = answered.read_rows(section.validation, artifacts.base)
    chosen = rows_of(section.part, every, tasks.of(m.contract))
    place = {id(row): i for i, row in enumerate(every)}
    baseline = answered.read(reference / answered.ROWS).of_rows([place[id(r)] for r in chosen])
    fit_on = (train, answered.read(reference / answered.TRAIN)) if train else None
    if fit_on is not None and section.validation.validate_.metric != "probe_accuracy":
        fit_on = None
    whole = [Look(len(chosen), section.alpha)]
    with one_torch_thread(), closing(_open(m)) as runner:
        answering = _Answering(m, runner, chosen, baseline, fit_on)
        if section.part == "search":
            look, document = sequential.screen(answering.judge, len(chosen), section.alpha)
        else:
            look, document = whole[0], answering.judge(whole[0])[1]
    document |= {"rows": look.rows, "of": len(chosen), "alpha": look.error}
    (out / FILE).write_text(json.dumps(document, indent=1), encoding="utf-8")


def _open(m: RunArtifacts) -> Any:
    device = "cpu" if target_runner.why_not_run(m) else m.section.target.runs_on
    return target_runner.open_candidate(m, device)


class _Answering:
    """One form's answers so far, and their comparison with the float model's.

    rows, baseline: rows of the part, the float model's answers to them
    fit_on: rows of a probe, and the float model's answers to them
    """

    def __init__(
        self,
        m: RunArtifacts,
        runner: Any,
        rows: Sequence[Sample],
        baseline: Answers,
        fit_on: answers.Train | None,
    ) -> None:
        self._m, self._runner, self._rows, self._baseline = m, runner, rows, baseline
        self._fit_on, self._parts = fit_on, list[Answers]()

    def judge(self, look: Look) -> tuple[Verdict, dict[str, Any]]:
        """Answer the rows that are missing for a look, and test all answers at its level."""
        done = sum(len(part.text) for part in self._parts)
        more = self._rows[done : look.rows]
        if more:
            self._parts.append(answers.answer(self._m, self._runner, more, "search: answers"))
        rows = self._rows[: look.rows]
        systems = self._baseline.of_rows(range(look.rows)), joined(self._parts)
        judged, quality = compare(at_level(self._m, look.error), rows, systems, self._fit_on, None)
        verdict = gates.overall(judged)
        return verdict, {
            "verdict": verdict,
            "quality": {n: v for n, v in quality.items() if n != "each"},
            "gates": [g.as_dict() for g in judged],
        }


def joined(parts: Sequence[Answers]) -> Answers:
    """Join the answers to consecutive rows."""

    def whole(name: str) -> tuple[Any, ...] | None:
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else tuple(v for part in values for v in part)

    return Answers(whole("text") or (), whole("pair"), whole("words"), whole("spans"))


def at_level(m: RunArtifacts, alpha: float) -> RunArtifacts:
    """The same folders, judged at confidence 1 - alpha."""
    settings = m.section.validate_.model_copy(update={"confidence": 1 - alpha})
    section = m.section.model_copy(update={"validate_": settings})
    folders = (m.source, m.state_folder, m.graph, m.model, m.engine)
    return RunArtifacts(section, *folders, scratch=m.scratch)


def files(section: Judging) -> dict[str, str]:
    """Digests of the data and of the code that opens the target, and the machine."""
    machine = this_machine()
    return {
        **answered.files(section.validation),
        **targets.of(section.validation.target.runtime).code("open"),
        "machine": f"{machine.cpu}, {machine.cores} cores, {machine.gpu}",
    }


STAGE = Stage("judged", 1, run, packages=(*answered.STAGE.packages, "onnxruntime"), files=files)
