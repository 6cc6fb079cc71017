"""Check that the engine gave the answers that the quality gates judge: hop `rows` of the ledger.

1. file       the runner has the lowered and built files open, by their digests
2. identity   some rows, answered again by the engine as in hop `engine`, get the same bits
3. not float  where compression changed a value, some row differs from the float model's answer
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
from optimizer.validate.decoder import OnnxDecoder, compute_logits
from optimizer.validate.ledger.distance import Distance
from optimizer.validate.ledger.entry import LedgerEntry
from optimizer.validate.quality import answers, perplexity
from optimizer.validate.quality.perplexity import Ids, Scores
from optimizer.validate.quality.quality import Answers
from optimizer.validate.run_artifacts import RunArtifacts

SAME = Distance(0.0, 0.0, 1.0, 0.0)
WHY = "the same file in the same kernels gives the same bits"
NOT_AGAIN = (
    "only files are compared: rows that are answered again may get other bits on this device, in "
    "torch, or in another distribution's runtime"
)


@dataclass
class EngineRows:
    """Checks that the quality gates judged the answers of the target's engine.

    m: artifacts of the run
    device: device that the candidate was opened on
    answered_by: {file name: sha256} of the files that the candidate has open, from
        judged.digest_files
    problems: sentences, one per violation
    place: path in the recipe of the rows of the first set
    """

    m: RunArtifacts
    device: str
    answered_by: dict[str, str] | None = None
    problems: list[str] = field(default_factory=list)
    place: str = "validate.data"

    def check_files(self, runner: Any) -> None:
        """Add a problem for each file that `runner`, the candidate, has open and that is not the
        target's."""
        self.answered_by = judged.digest_files(self.m, runner)
        digests = judged.files(self.m)
        expected = {**digests["model"], **digests["engine"]}
        self.problems += [
            f"quality was measured with {runner.model.parent.name}/{name} of sha256 {digest}, and "
            f"the target's file has {expected.get(name)}"
            for name, digest in (self.answered_by or {}).items()
            if digest != expected.get(name)
        ]

    def check_answers(self, sets: Mapping[str, tuple[Sequence[Sample], Answers, Answers]]) -> None:
        """Add problems where the engine, run again, answers rows with other bits, or where all
        answers of a changed model equal the float model's.

        sets: {name of the set: (rows, baseline's answers, candidate's answers)}
        """
        for name, (rows, baseline, candidate) in sets.items():
            alike = all(map(np.array_equal, candidate.text, baseline.text))
            self._not_float(alike, len(rows), name)
        if not target_runner.repeats_proven_bits(self.m, self.device):
            return
        with closing(target_runner.open_proven(self.m)) as engine:
            for name, (rows, _, candidate) in sets.items():
                for group in _sampled(answers.group_rows(self.m, rows)):
                    part = [rows[i] for i in group]
                    again = answers.answer(self.m, engine, part, "validate: rows again")
                    judged_part = candidate.of_rows(group)
                    self._identical(_same_bits(again, judged_part), f"row {group[0]}", name)

    def check_windows(self, sets: Mapping[str, tuple[Sequence[Ids], Scores]]) -> None:
        """Add problems where the engine, run again, scores windows of text with other bits.

        sets: {name of the set: (windows of token ids, their scores)}
        """
        for name, (windows, scores) in sets.items():
            alike = np.array_equal(scores.candidate, scores.baseline) and not scores.kl.any()
            self._not_float(alike, len(windows), name)
        if not target_runner.repeats_proven_bits(self.m, self.device):
            return
        with closing(target_runner.open_proven(self.m)) as engine:
            system = OnnxDecoder(engine, self.m.contract)
            for name, (windows, scores) in sets.items():
                for i in _sampled(range(len(windows))):
                    again = perplexity.measure_nll(compute_logits(system, windows[i]), windows[i])
                    self._identical(again == scores.candidate[i], f"window {i}", name)

    def entry(self) -> LedgerEntry:
        """Make the entry of hop `rows`: failed where there are problems, not run where this machine
        cannot repeat the bits of the candidate."""
        start, problems = "engine", tuple(self.problems)
        if problems:
            return LedgerEntry("rows", start, None, None, False, WHY, problems)
        if target_runner.repeats_proven_bits(self.m, self.device):
            return LedgerEntry("rows", start, 0.0, SAME, True, WHY)
        return LedgerEntry("rows", start, None, None, None, NOT_AGAIN)

    def _identical(self, alike: bool, where: str, name: str) -> None:
        if not alike:
            self.problems.append(
                f"{where} of {name or self.place} was judged with other bits than the engine "
                "gives: quality was measured with another model than the target's"
            )

    def _not_float(self, alike: bool, rows: int, name: str) -> None:
        if alike and computes_otherwise(self.m):
            self.problems.append(
                f"all {rows} rows of {name or self.place} have the float model's answers bit "
                "for bit, although compression changed the model: the candidate did not answer them"
            )


def computes_otherwise(m: RunArtifacts) -> bool:
    """Return True if the candidate computes with other values than the reference: another
    checkpoint, quantized inputs, or weights that quantization or pruning changed."""
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
    return [groups[i] for i in sorted({0, len(groups) // 2, len(groups) - 1})]


def _same_bits(again: Answers, first: Answers) -> bool:
    """Return True if every answer of `first` has the same bits in `again`."""
    pairs = [(again.text, first.text), (again.pair, first.pair), (again.words, first.words)]
    compared = [(a or (), f) for a, f in pairs if f is not None]
    return all(len(a) == len(f) and all(map(np.array_equal, a, f)) for a, f in compared)
