"""Measure the latency gain: the smaller model's speed over the unreduced model's, on the target.

The smaller model is the one that was built. The unreduced one is the reference as stage `latencies`
made it: in the same quantization or in float. Both are timed in turns in the first
cell of validate.latency, end to end (text-generation: between tokens), until the gate is decided
(timing/stopping_rules.py):

    speed.latency_gain   mean over openings of both models of the smaller model's time / the
                         unreduced model's. Let least = reduce.goal.latency_gain less
                         reduce.gain_tolerance: an interval wholly faster than it passes, wholly
                         slower fails
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from optimizer.foundation.progress import say
from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.runtimes.ort.run import cores
from optimizer.model.checkpoint.checkpoint import read_json
from optimizer.recipe.schema import Latency, TargetSection
from optimizer.reduce.structure.latency_table import TABLE
from optimizer.timing.stopping_rules import (
    RatioQuestion,
    SequentialTest,
    StoppingRule,
    TimeBudget,
)
from optimizer.validate.gates import Gate
from optimizer.validate.ledger.breach import write_breach
from optimizer.validate.run_artifacts import RunArtifacts
from optimizer.validate.target_runner import float_baselines, open_onnx
from optimizer.validate.timing.batch_timing import BatchTimer, list_cells, make_system
from optimizer.validate.timing.cells import CANDIDATE, CellTimer, MoreRounds, TimingComparison
from optimizer.validate.timing.generation_timing import GenerationTimer, OwnCache
from optimizer.validate.timing.openings import Openings
from optimizer.validate.timing.speed_gates import describe_undecided

UNREDUCED = "unreduced"
NAME = "speed.latency_gain"


@dataclass(frozen=True)
class ModelFolders:
    """Folders of one model whose latency gain is timed.

    source: folder with contract.json and checkpoint/, tokenizer included
    model: folder with model.onnx
    """

    source: Path
    model: Path


@dataclass(frozen=True)
class GainCell:
    """The first cell of `latency` on one target, in which two models are timed in turns.

    gain_over: precision of the unreduced model, as reduce.gain_over
    """

    target: TargetSection
    latency: Latency
    texts: Sequence[str]
    gain_over: str = "same_form"

    def compare(
        self, unreduced: ModelFolders, candidate: ModelFolders, rule: StoppingRule
    ) -> dict[str, Any]:
        """Time two models until `rule` stops. Returns {"batch", "sequence" or "prompt", "runs",
        "ratio", "interval", "p50": {name: ms}} and the fields of the rule; ratio: time of the
        candidate / time of the unreduced model.

        The models are opened several times for a SequentialTest, of a RatioQuestion, and else once.
        """
        threads = self.target.intra_op_threads or cores()
        models = {
            UNREDUCED: (self.full_target, unreduced),
            CANDIDATE: (self.target, candidate),
        }
        own = {n: contracts.read(m.source / "contract.json") for n, (_, m) in models.items()}
        contract = own[CANDIDATE]
        encoder = tasks.look_up(contract).inputs.open(candidate.source / "checkpoint", contract)
        openings = Openings(
            {
                name: partial(open_onnx, target, model.model / "model.onnx", threads=threads)
                for name, (target, model) in models.items()
            }
        )
        timer: CellTimer
        systems: dict[str, Any]
        if tasks.look_up(contract).generates:
            timer = GenerationTimer(contract, encoder, self.texts, self.latency, threads, openings)
            systems = {n: OwnCache(openings.runner(n), own[n]) for n in models}
        else:
            timer = BatchTimer(self.texts, self.latency, threads, openings)
            systems = {n: make_system(openings.runner(n).infer, contract, encoder) for n in models}
        compared = (
            TimingComparison(timer, rule, UNREDUCED) if isinstance(rule, SequentialTest) else None
        )
        more = compared.more if compared else _more(rule, timer)
        opening = compared.opening if compared else 0
        with closing(openings):
            openings.open()
            measured = timer.time(systems, self.sizes(contract), UNREDUCED, more, opening)
        (cell,) = measured["cells"]
        ratio = timer.ratio(cell) | (compared.as_dict() if compared else {})
        return {
            **{
                name: cell[name] for name in ("batch", "sequence", "prompt", "runs") if name in cell
            },
            "p50": {n: s[timer.percentiles]["p50"] for n, s in cell["systems"].items()},
            "ratio": ratio.pop("median"),
            **{name: figure for name, figure in ratio.items() if name not in ("of", "to")},
        }

    @property
    def full_target(self) -> TargetSection:
        """Target section with which the unreduced model is opened."""
        if self.gain_over == "same_form":
            return self.target
        return next(iter(float_baselines(self.target).values()))

    def sizes(self, contract: Contract) -> tuple[int, int]:
        """Return the sizes of the timed cell: (batch, tokens of a text or prompt)."""
        longest = self.latency.sequence[0]
        if not tasks.look_up(contract).generates:
            longest = tasks.longest(contract)
        return list_cells(self.latency, longest)[0]


def _more(rule: StoppingRule, timer: CellTimer) -> MoreRounds:
    """Return the function (times so far) -> number of rounds to run next, by which `rule` stops."""

    def more(times: Mapping[str, Sequence[Any]]) -> int:
        pairs = zip(times[CANDIDATE], times[UNREDUCED], strict=True)
        return rule.more([timer.milliseconds(a) / timer.milliseconds(b) for a, b in pairs])

    return more


def measure(m: RunArtifacts, texts: Sequence[str], questions: int) -> dict[str, Any]:
    """Measure the report's `speed.gain`: the smaller model and the unreduced one, timed in turns.

    texts: timed inputs
    questions: number of gates that share latency.max_seconds
    """
    assert m.unreduced is not None
    latency, reduce = m.section.validate_.latency, m.section.reduce
    assert reduce is not None
    assert reduce.least_gain is not None
    budget = TimeBudget(latency.max_seconds, questions)
    question = RatioQuestion.share_rounds(1 / reduce.least_gain, latency.iterations)
    test = budget.test(question, latency.iterations)
    cell = GainCell(m.section.target, latency, texts, reduce.gain_over)
    precision = (
        "the same quantization"
        if reduce.gain_over == "same_form"
        else f"float ({cell.full_target.computes_in})"
    )
    say(f"validate: timing the smaller model and the unreduced one in {precision}, in turns")
    compared = cell.compare(
        ModelFolders(m.reference, m.unreduced), ModelFolders(m.source, m.model), test
    )
    goal = {"goal": reduce.latency_gain, "least": reduce.least_gain}
    return {**goal, "over": reduce.gain_over, "form": precision, **compared}


def read_table(m: RunArtifacts) -> dict[str, Any] | None:
    """Read the report's `latencies`, the table of timed sizes; None without one."""
    return None if m.unreduced is None else read_json(m.unreduced.parent / TABLE)


def declare_gate(m: RunArtifacts) -> tuple[str, float] | None:
    """Return (name, limit) of the gate of a latency gain; None where the recipe asks for none."""
    least = m.section.reduce.least_gain if m.section.reduce else None
    return (NAME, least) if m.gains and least is not None else None


def judge(section: Mapping[str, Any], shared: int) -> Gate:
    """Judge the section that `measure` returned.

    shared: number of questions that share latency.max_seconds (count_questions)
    """
    least, (low, high) = section["least"], section["interval"]
    verdict = "inconclusive"
    if high is not None and high < 1 / least:
        verdict = "pass"
    elif low is not None and low >= 1 / least:
        verdict = "fail"
    gain, interval = 1 / section["ratio"], (_over(high), _over(low))
    where = f"batch {section['batch']}, " + (
        f"sequence {section['sequence']}"
        if "sequence" in section
        else f"prompts of {section['prompt']} tokens"
    )
    message = (
        f"{gain:.2f} times as fast as the unreduced model in {section['form']} at {where}; the "
        f"goal is {section['goal']:g}, and {least:.3g} or more counts as met"
    )
    if verdict == "inconclusive":
        message += describe_undecided(section, shared, f"so near {least:.3g}")
    if verdict == "fail":
        most, asked_for = write_breach(1 / low, least)
        message += (
            f"; at most {most}, required {asked_for}: set reduce.goal.latency_gain to a gain that "
            "was reached, or run again with --remeasure if the machine was busy with other work"
        )
    return Gate(NAME, verdict, gain, least, interval, message)


def _over(end: float | None) -> float | None:
    return 1 / end if end else None
