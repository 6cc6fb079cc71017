"""Measure the latency gain: the smaller model's speed over the unreduced model's, on the target.

The smaller model is the one that was built. The unreduced one is the reference as stage `latencies`
made it: in the same form (the same quantization) or in float. Both are timed in turns in the first
cell of validate.latency, end to end (text-generation: between tokens), until the gate is decided
(timing/stopping_rules.py):

    speed.latency_gain   median over rounds of the smaller model's time / the unreduced model's. Let
                         least = reduce.goal.latency_gain less reduce.gain_tolerance: an interval
                         wholly faster than it passes, wholly slower fails
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizer.foundation.progress import say
from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.bundle import bench, bench_generation
from optimizer.harness.contract import Contract
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.harness.runtimes.ort.run import cores
from optimizer.harness.runtimes.runner import Runner
from optimizer.model.checkpoint.checkpoint import read_json
from optimizer.recipe.schema import Latency, TargetSection
from optimizer.reduce.structure.latency_table import TABLE
from optimizer.timing.stopping_rules import QuantileQuestion, StoppingRule, TimeBudget
from optimizer.validate.gates import Gate
from optimizer.validate.ledger.breach import breach
from optimizer.validate.run_artifacts import RunArtifacts
from optimizer.validate.target_runner import float_forms, open_onnx
from optimizer.validate.timing import batch_timing, generation_timing
from optimizer.validate.timing.cells import CANDIDATE
from optimizer.validate.timing.generation_timing import OwnCache
from optimizer.validate.timing.speed_gates import would_decide

UNREDUCED = "unreduced"
NAME = "speed.latency_gain"


@dataclass(frozen=True)
class ModelFolders:
    """Folders of one model.

    source: folder with contract.json and checkpoint/, tokenizer included
    model: folder with model.onnx
    """

    source: Path
    model: Path


@dataclass(frozen=True)
class GainCell:
    """First cell of `latency` on one target, in which two models are timed in turns. over: form of
    the unreduced model, as reduce.gain_over."""

    target: TargetSection
    latency: Latency
    texts: Sequence[str]
    over: str = "same_form"

    def compare(
        self, unreduced: ModelFolders, candidate: ModelFolders, rule: StoppingRule
    ) -> dict[str, Any]:
        """Time two models until `rule` stops. Returns {"batch", "sequence" or "prompt", "runs",
        "ratio", "interval", "p50": {name: ms}} and the fields of the rule; ratio: time of the
        candidate / time of the unreduced model."""
        contract = contracts.read(candidate.source / "contract.json")
        threads = self.target.intra_op_threads or cores()
        files = [model.model / "model.onnx" for model in (unreduced, candidate)]
        with (
            closing(open_onnx(self.full_target, files[0], threads=threads)) as full,
            closing(open_onnx(self.target, files[1], threads=threads)) as smaller,
        ):
            if tasks.of(contract).generates:
                own = OwnCache(full, contracts.read(unreduced.source / "contract.json"))
                return self._time_tokens({UNREDUCED: own, CANDIDATE: smaller}, candidate, rule)
            return self._time_answers({UNREDUCED: full, CANDIDATE: smaller}, candidate, rule)

    @property
    def full_target(self) -> TargetSection:
        """Target section with which the unreduced model is opened."""
        if self.over == "same_form":
            return self.target
        return next(iter(float_forms(self.target).values()))

    def sizes(self, contract: Contract) -> tuple[int, int]:
        """(batch, tokens of a text or prompt) of the cell."""
        longest = self.latency.sequence[0]
        if not tasks.of(contract).generates:
            longest = tasks.longest(contract)
        return batch_timing.grid(self.latency, longest)[0]

    def _time_answers(
        self, runners: Mapping[str, Runner], model: ModelFolders, rule: StoppingRule
    ) -> dict[str, Any]:
        contract = contracts.read(model.source / "contract.json")
        encoder = tasks.of(contract).inputs.open(model.source / "checkpoint", contract)
        measured = bench.measure(
            {name: batch_timing.graph_system(r, contract, encoder) for name, r in runners.items()},
            [self.sizes(contract)],
            self.texts,
            iterations=self.latency.iterations,
            warmup=batch_timing.WARMUP,
            baseline=UNREDUCED,
            more=_more(rule, lambda ms: ms),
        )
        (cell,) = measured["cells"]
        p50 = {name: s["end_to_end"]["p50"] for name, s in cell["systems"].items()}
        sizes = {"batch": cell["batch"], "sequence": cell["sequence"], "runs": cell["runs"]}
        return {**sizes, **_figures(cell["ratio"], p50, rule)}

    def _time_tokens(
        self, runners: Mapping[str, Any], model: ModelFolders, rule: StoppingRule
    ) -> dict[str, Any]:
        contract = contracts.read(model.source / "contract.json")
        batch, prompt = self.sizes(contract)
        measured = bench_generation.measure_generation(
            runners,
            contract,
            load_tokenizer(model.source / "checkpoint", contract),
            self.texts,
            [prompt],
            [batch],
            self.latency.new_tokens,
            self.latency.iterations,
            warmup=generation_timing.WARMUP,
            baseline=UNREDUCED,
            more=_more(rule, lambda round_: sum(round_[1])),
        )
        (cell,) = measured["cells"]
        p50 = {name: s["inter_token"]["p50"] for name, s in cell["systems"].items()}
        sizes = {"batch": batch, "prompt": prompt, "runs": cell["runs"]}
        return {**sizes, **_figures(cell["ratio"]["inter_token"], p50, rule)}


def _more(
    rule: StoppingRule, milliseconds: Callable[[Any], float]
) -> Callable[[Mapping[str, Any]], int]:
    """Function from the times so far to the number of rounds to run next, by their ratios."""

    def more(times: Mapping[str, Sequence[Any]]) -> int:
        pairs = zip(times[CANDIDATE], times[UNREDUCED], strict=True)
        return rule.more([milliseconds(smaller) / milliseconds(full) for smaller, full in pairs])

    return more


def _figures(
    ratio: Mapping[str, Any], p50: Mapping[str, float], rule: StoppingRule
) -> dict[str, Any]:
    figures = {"ratio": ratio["median"], "interval": ratio["interval"], "p50": dict(p50)}
    return figures | rule.as_dict()


def measure(m: RunArtifacts, texts: Sequence[str], questions: int) -> dict[str, Any]:
    """Measure the report's `speed.gain`. questions: number that share latency.max_seconds."""
    assert m.unreduced is not None
    latency, reduce = m.section.validate_.latency, m.section.reduce
    assert reduce is not None
    assert reduce.least_gain is not None
    budget = TimeBudget(latency.max_seconds, questions)
    question = QuantileQuestion(50, 1 / reduce.least_gain)
    test = budget.test(question, latency.iterations, batch_timing.WARMUP)
    cell = GainCell(m.section.target, latency, texts, reduce.gain_over)
    over = reduce.gain_over
    form = "the same form" if over == "same_form" else f"float ({cell.full_target.computes_in})"
    say(f"validate: timing the smaller model and the unreduced one in {form}, in turns")
    compared = cell.compare(
        ModelFolders(m.reference, m.unreduced), ModelFolders(m.source, m.model), test
    )
    goal = {"goal": reduce.latency_gain, "least": reduce.least_gain}
    return {**goal, "over": over, "form": form, **compared}


def read_table(m: RunArtifacts) -> dict[str, Any] | None:
    """Read the report's `latencies`, the table of timed sizes; None without one."""
    return None if m.unreduced is None else read_json(m.unreduced.parent / TABLE)


def declared_gate(m: RunArtifacts) -> tuple[str, float] | None:
    """Name and limit of the gate; None where the recipe asks for no latency gain."""
    least = m.section.reduce.least_gain if m.section.reduce else None
    return (NAME, least) if m.gains and least is not None else None


def gate(section: Mapping[str, Any], shared: int) -> Gate:
    """Judge the section that `measure` returned. shared: see speed_gates.would_decide."""
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
        message += would_decide(section, shared, f"so near {least:.3g}")
    if verdict == "fail":
        most, asked_for = breach(1 / low, least)
        message += (
            f"; at most {most}, required {asked_for}: set reduce.goal.latency_gain to a gain that "
            "was reached, or run again with --remeasure if the machine was busy with other work"
        )
    return Gate(NAME, verdict, gain, least, interval, message)


def _over(end: float | None) -> float | None:
    return 1 / end if end else None
