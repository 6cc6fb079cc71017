"""The rows that the quality gates judge are answers of the engine. Hop `rows` of the ledger:

1. file       what answered has the files open that were lowered and built, by their digests
2. identity   some rows, answered again by the engine as hop `engine` runs it, get the same bits
3. not float  where compression changed a value, not every row has the float model's bits
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch

from optimizer.data.datasets import Sample
from optimizer.validate import judged, target_runner
from optimizer.validate.decoder import OnnxDecoder, logits_of
from optimizer.validate.ledger.distance import Distance
from optimizer.validate.ledger.entry import Entry
from optimizer.validate.quality import answers, perplexity
from optimizer.validate.quality.perplexity import Ids, Scores
from optimizer.validate.quality.quality import Answers
from optimizer.validate.run_artifacts import RunArtifacts

SAME = Distance(0.0, 0.0, 1.0, 0.0)
WHY = "the same file in the same kernels gives the same bits"
NOT_AGAIN = (
    "only files are compared: answered again, rows may get other bits on this device, in torch, "
    "or by another distribution's runtime"
)


@dataclass
class EngineRows:
    """Findings about the rows of one target. device: that the candidate was opened on.
    answered_by: see judged.files_of."""

    m: RunArtifacts
    device: str
    answered_by: dict[str, str] | None = None
    problems: list[str] = field(default_factory=list)

    def opened(self, runner: Any) -> None:
        """Law 1. runner: what answers for the candidate."""
        self.answered_by = judged.files_of(self.m, runner)
        own = judged.files(self.m)
        expected = {**own["model"], **own["engine"]}
        self.problems += [
            f"quality was answered by {runner.model.parent.name}/{name} with sha256 {digest}, and "
            f"the target's has {expected.get(name)}"
            for name, digest in (self.answered_by or {}).items()
            if digest != expected.get(name)
        ]

    def encoders(self, sets: Mapping[str, tuple[Sequence[Sample], Answers, Answers]]) -> None:
        """Laws 2 and 3 of each set: rows, and the baseline's and the candidate's answers."""
        for name, (rows, baseline, candidate) in sets.items():
            alike = all(map(np.array_equal, candidate.text, baseline.text))
            self._not_float(alike, len(rows), name)
        if not target_runner.repeats_proven_bits(self.m, self.device):
            return
        with closing(target_runner.open_proven(self.m)) as engine:
            for name, (rows, _, candidate) in sets.items():
                for group in _sampled(answers.groups(self.m, rows)):
                    part = [rows[i] for i in group]
                    again = answers.answer(self.m, engine, part, "validate: rows again")
                    kept = _part(candidate, group)
                    self._identical(_alike(again, kept), f"row {group[0]}", name)

    def decoders(self, sets: Mapping[str, tuple[Sequence[Ids], Scores]]) -> None:
        """Laws 2 and 3 of each set: its windows and their scores."""
        for name, (windows, scores) in sets.items():
            alike = np.array_equal(scores.candidate, scores.baseline) and not scores.kl.any()
            self._not_float(alike, len(windows), name)
        if not target_runner.repeats_proven_bits(self.m, self.device):
            return
        with closing(target_runner.open_proven(self.m)) as engine:
            system = OnnxDecoder(engine, self.m.contract)
            for name, (windows, scores) in sets.items():
                for i in _sampled(range(len(windows))):
                    again = perplexity.nll(logits_of(system, windows[i]), windows[i])
                    self._identical(again == scores.candidate[i], f"window {i}", name)

    def entry(self) -> Entry:
        """Of the ledger."""
        start, problems = "engine", tuple(self.problems)
        if problems:
            return Entry("rows", start, None, None, False, WHY, problems)
        if target_runner.repeats_proven_bits(self.m, self.device):
            return Entry("rows", start, 0.0, SAME, True, WHY)
        return Entry("rows", start, None, None, None, NOT_AGAIN)

    def _identical(self, alike: bool, where: str, name: str) -> None:
        if not alike:
            self.problems.append(
                f"{where} of {name or 'validate.data'} was judged with other bits than the engine "
                "answers: another model than the target's answered for quality"
            )

    def _not_float(self, alike: bool, rows: int, name: str) -> None:
        if alike and changed(self.m):
            self.problems.append(
                f"all {rows} rows of {name or 'validate.data'} have the float model's answers to "
                "the bit, and compression changed the model: the candidate did not answer them"
            )


def changed(m: RunArtifacts) -> bool:
    """True where the candidate computes with other values than the reference: another
    checkpoint's, quantized inputs, or weights that quantization or pruning changed."""
    state = m.state
    if m.original is not None or any(map(state.activations_of, state.modules)):
        return True
    pruned = ((name, state.replaced[name]) for name in state.pruned_floats)
    rounded = ((name, q.dequantize()) for name, q in state.weights.items())
    return any(
        not torch.equal(value.flatten(1), m.parameters[name].flatten(1))
        for name, value in chain(pruned, rounded)
    )


def _sampled(groups: Sequence[Any]) -> Iterable[Any]:
    """The first, the middle one and the last."""
    return [groups[i] for i in sorted({0, len(groups) // 2, len(groups) - 1})]


def _part(whole: Answers, rows: Sequence[int]) -> Answers:
    """The answers to some of the rows."""

    def some(values: Sequence[Any] | None) -> tuple[Any, ...] | None:
        return None if values is None else tuple(values[i] for i in rows)

    return Answers(some(whole.text) or (), some(whole.pair), some(whole.words))


def _alike(again: Answers, kept: Answers) -> bool:
    """True where every answer that was judged has the same bits."""
    pairs = [(again.text, kept.text), (again.pair, kept.pair), (again.words, kept.words)]
    judged_pairs = [(a or (), k) for a, k in pairs if k is not None]
    return all(len(a) == len(k) and all(map(np.array_equal, a, k)) for a, k in judged_pairs)
