"""Stage `judged`: answer rows with one candidate, and test its drop against the margins.

Rows of the search are answered look by look (search/sequential.py), until a margin is surely
missed; held-out rows are answered at once. The gates are those of the recipe on validate.data: the
metric, and the mean cosine where the recipe has min_cosine.

out/judged.json   verdict     pass | fail | inconclusive, of all gates at the last look
                  rows, of    rows (text-generation: windows) answered, and in the part
                  alpha       level of the last look
                  quality     section of the report (validate/quality/quality.py)
                  gates       [{name, verdict, message, ...}] at the last look
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from optimizer import targets
from optimizer.data.datasets import Sample, Window, cut_windows
from optimizer.foundation.errors import MachineError
from optimizer.foundation.progress import bar
from optimizer.foundation.verdicts import Verdict
from optimizer.harness import tasks
from optimizer.harness.runtimes.machine import describe_machine
from optimizer.search import sequential
from optimizer.search.sequential import Look
from optimizer.search.stages import answered
from optimizer.search.stages.sections import Judging
from optimizer.search.stages.split import Part, select_rows
from optimizer.store import Artifacts, Stage
from optimizer.validate import gates, target_runner
from optimizer.validate.decoder import OnnxDecoder, TorchDecoder, compute_logits
from optimizer.validate.gates import Gate
from optimizer.validate.quality import answers, perplexity
from optimizer.validate.quality.perplexity import Scores
from optimizer.validate.quality.quality import PER_ROW, Answers
from optimizer.validate.run_artifacts import RunArtifacts
from optimizer.validate.stage import compare, use_one_torch_thread

FILE = "judged.json"
SCORES = ("baseline", "candidate", "kl", "top1")
Judge = Callable[[Look], tuple[Verdict, dict[str, Any]]]


def run(section: Judging, reference: Path, artifacts: Artifacts[Path], out: Path) -> None:
    """Judge a search's candidate, whose folders are `artifacts`, on its answers. reference: folder
    of `answered`.

    Raises MachineError where nothing on this machine answers for the target."""
    folders = (artifacts.base, artifacts.state, artifacts.graph, artifacts.model, artifacts.engine)
    m = RunArtifacts(section.validation, *folders, scratch=out)
    if why := target_runner.explain_not_answered(m):
        raise MachineError(why, where=f"target {section.validation.target.name}")
    with use_one_torch_thread(), closing(_open(m)) as runner:
        judge, count = _judge(m, runner, section.part, reference)
        if section.part == "search":
            look, document = sequential.screen(judge, count, section.alpha)
        else:
            look = Look(count, section.alpha)
            document = judge(look)[1]
    document |= {"rows": look.rows, "of": count, "alpha": look.error}
    (out / FILE).write_text(json.dumps(document, indent=1), encoding="utf-8")


def _open(m: RunArtifacts) -> Any:
    device = "cpu" if target_runner.explain_not_run(m) else m.section.target.runs_on
    return target_runner.open_candidate(m, device)


def _judge(m: RunArtifacts, runner: Any, part: Part, reference: Path) -> tuple[Judge, int]:
    """Return, to judge a search's candidate, a function from a look to (verdict, document), and the
    number of rows of one part.

    m: folders of the candidate
    runner: runner that answers for the candidate
    reference: folder of `answered`
    """
    every, train = answered.read_rows(m.section, m.source)
    task = tasks.look_up(m.contract)
    chosen = select_rows(part, every, task)
    if task.generates:
        reading = _Reading(m, runner, cut_held_out(m, chosen))
        return reading.judge, len(reading.windows)
    baseline = answered.read_baseline(reference, every, chosen)
    fit_on = answered.probe_rows(reference, train)
    return _Answering(m, runner, chosen, baseline, fit_on).judge, len(chosen)


def cut_held_out(m: RunArtifacts, rows: Sequence[Sample]) -> list[Window]:
    """Cut a search's held-out texts into windows of validate.sequence_length tokens, for text
    generation."""
    return cut_windows(rows, m.encoder, m.contract, m.section.validate_.sequence_length)


class _Reading:
    """Scores of the float model and of a search's candidate on the windows read so far."""

    def __init__(self, m: RunArtifacts, runner: Any, windows: Sequence[Window]) -> None:
        self._m, self.windows = m, windows
        self._baseline = TorchDecoder(m.reference_model, m.contract)
        self._candidate = OnnxDecoder(runner, m.contract)
        self._parts: list[Scores] = []

    def judge(self, look: Look) -> tuple[Verdict, dict[str, Any]]:
        """Score the windows that this look adds, and test all of the candidate's scores at the
        look's level."""
        done = sum(len(part.added) for part in self._parts)
        if more := self.windows[done : look.rows]:
            scores = perplexity.score(
                bar(more, "search: windows"),
                lambda ids: compute_logits(self._baseline, ids),
                lambda ids: compute_logits(self._candidate, ids),
            )
            self._parts.append(scores)
        scores = _joined_scores(self._parts)
        settings = at_level(self._m, look.error).section.validate_
        return _document(*perplexity.judge(scores, settings))


def _joined_scores(parts: Sequence[Scores]) -> Scores:
    baseline, candidate, kl, top1 = (
        np.concatenate([getattr(part, name) for part in parts]) for name in SCORES
    )
    return Scores(baseline, candidate, kl, top1, sum(part.tokens for part in parts))


def _document(judged: Sequence[Gate], quality: dict[str, Any]) -> tuple[Verdict, dict[str, Any]]:
    verdict = gates.judge_overall(judged)
    return verdict, {
        "verdict": verdict,
        "quality": {n: v for n, v in quality.items() if n not in ("each", "added", "digest")},
        "gates": [g.as_dict() for g in judged],
    }


class _Answering:
    """Answers of one candidate of a search so far, and their comparison with the float model's.

    rows, baseline: rows of the part, and the float model's answers to them
    fit_on: rows that a probe is fitted to, with the float model's answers; None for other metrics
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
        """Answer the rows that this look adds, and test all of the candidate's answers at the
        look's level."""
        done = sum(len(part.text) for part in self._parts)
        more = self._rows[done : look.rows]
        if more:
            self._parts.append(answers.answer(self._m, self._runner, more, "search: answers"))
        rows = self._rows[: look.rows]
        systems = self._baseline.of_rows(range(look.rows)), joined(self._parts)
        return _document(*compare(at_level(self._m, look.error), rows, systems, self._fit_on, None))


def joined(parts: Sequence[Answers]) -> Answers:
    """Join a candidate's answers to consecutive rows."""

    def whole(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else tuple(v for part in values for v in part)

    return replace(parts[0], **{name: whole(name) for name in PER_ROW})


def at_level(m: RunArtifacts, alpha: float) -> RunArtifacts:
    """Return a candidate's folders with settings that judge it at confidence 1 - alpha."""
    settings = m.section.validate_.model_copy(update={"confidence": 1 - alpha})
    section = m.section.model_copy(update={"validate_": settings})
    folders = (m.source, m.state_folder, m.graph, m.model, m.engine)
    return RunArtifacts(section, *folders, scratch=m.scratch)


def files(section: Judging) -> dict[str, str]:
    """Return, for the key of this stage of a search, the digests of the data and of the code that
    opens the target, and the machine."""
    return {
        **answered.files(section.validation),
        **targets.look_up(section.validation.target.runtime).code("open"),
        "machine": describe_machine().key,
    }


STAGE = Stage("judged", 1, run, packages=(*answered.STAGE.packages, "onnxruntime"), files=files)
