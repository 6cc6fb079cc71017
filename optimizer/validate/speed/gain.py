"""How many times as fast the smaller model is as the whole one, where the recipe asks for that.

Both are what the target runs: the smaller one as it was built, the whole one as the latencies stage
made it of the reference, in the same form (the same quantization) or in float. Timed interleaved in
the first cell of validate.latency, end to end, of text-generation between tokens, until the gate is
decided (timing/rounds.py):

    speed.latency_gain   the median over rounds of the smaller one's time over the whole one's: its
                         whole interval faster than reduce.goal.latency_gain less
                         reduce.gain_tolerance passes, slower fails
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
from optimizer.timing.rounds import Budget, Question, Rounds, Settling
from optimizer.validate import served
from optimizer.validate.gates import Gate
from optimizer.validate.ledger.breach import breach
from optimizer.validate.run_artifacts import RunArtifacts
from optimizer.validate.speed import generation_speed, speed
from optimizer.validate.speed.generation_speed import OwnCache
from optimizer.validate.speed.speed import CANDIDATE

UNREDUCED = "unreduced"
NAME = "speed.latency_gain"
Until = Rounds | Settling


@dataclass(frozen=True)
class Built:
    """A model. source: has contract.json and checkpoint/, with its tokenizer; model: model.onnx."""

    source: Path
    model: Path


@dataclass(frozen=True)
class Cell:
    """What is timed: the target, and the first cell of `latency`, on these texts. over: the form of
    the whole one, as reduce.gain_over."""

    target: TargetSection
    latency: Latency
    texts: Sequence[str]
    over: str = "same_form"

    def compared(self, unreduced: Built, candidate: Built, rounds: Until) -> dict[str, Any]:
        """{"batch", "sequence" or "prompt", "runs", "ratio", "interval", "p50": {name: ms}}: of the
        candidate's time over the other's. rounds: how long that goes on, and what it came to."""
        contract = contracts.read(candidate.source / "contract.json")
        threads = self.target.intra_op_threads or cores()
        files = [model.model / "model.onnx" for model in (unreduced, candidate)]
        with (
            closing(served.opened(self.beside, files[0], threads=threads)) as whole,
            closing(served.opened(self.target, files[1], threads=threads)) as smaller,
        ):
            if tasks.of(contract).generates:
                own = OwnCache(whole, contracts.read(unreduced.source / "contract.json"))
                return self._generating({UNREDUCED: own, CANDIDATE: smaller}, candidate, rounds)
            return self._answering({UNREDUCED: whole, CANDIDATE: smaller}, candidate, rounds)

    @property
    def beside(self) -> TargetSection:
        """What the whole one is opened as."""
        if self.over == "same_form":
            return self.target
        return next(iter(served.float_forms(self.target).values()))

    def of(self, contract: Contract) -> tuple[int, int]:
        """(batch, sequence)."""
        longest = self.latency.sequence[0]
        if not tasks.of(contract).generates:
            longest = tasks.longest(contract)
        return speed.grid(self.latency, longest)[0]

    def _answering(
        self, runners: Mapping[str, Runner], model: Built, rounds: Until
    ) -> dict[str, Any]:
        contract = contracts.read(model.source / "contract.json")
        encoder = tasks.of(contract).inputs.open(model.source / "checkpoint", contract)
        measured = bench.measure(
            {name: speed.graph_system(r, contract, encoder) for name, r in runners.items()},
            [self.of(contract)],
            self.texts,
            iterations=self.latency.iterations,
            warmup=speed.WARMUP,
            baseline=UNREDUCED,
            more=_more(rounds, lambda ms: ms),
        )
        (cell,) = measured["cells"]
        p50 = {name: s["end_to_end"]["p50"] for name, s in cell["systems"].items()}
        known = {"batch": cell["batch"], "sequence": cell["sequence"], "runs": cell["runs"]}
        return {**known, **_figures(cell["ratio"], p50, rounds)}

    def _generating(
        self, runners: Mapping[str, Any], model: Built, rounds: Until
    ) -> dict[str, Any]:
        contract = contracts.read(model.source / "contract.json")
        batch, prompt = self.of(contract)
        measured = bench_generation.measure_generation(
            runners,
            contract,
            load_tokenizer(model.source / "checkpoint", contract),
            self.texts,
            [prompt],
            [batch],
            self.latency.new_tokens,
            self.latency.iterations,
            warmup=generation_speed.WARMUP,
            baseline=UNREDUCED,
            more=_more(rounds, lambda round_: sum(round_[1])),
        )
        (cell,) = measured["cells"]
        p50 = {name: s["inter_token"]["p50"] for name, s in cell["systems"].items()}
        known = {"batch": batch, "prompt": prompt, "runs": cell["runs"]}
        return {**known, **_figures(cell["ratio"]["inter_token"], p50, rounds)}


def _more(
    rounds: Until, milliseconds: Callable[[Any], float]
) -> Callable[[Mapping[str, Any]], int]:
    """How many rounds follow, by the ratios of those so far."""

    def more(times: Mapping[str, Sequence[Any]]) -> int:
        pairs = zip(times[CANDIDATE], times[UNREDUCED], strict=True)
        return rounds.more([milliseconds(ours) / milliseconds(whole) for ours, whole in pairs])

    return more


def _figures(ratio: Mapping[str, Any], p50: Mapping[str, float], rounds: Until) -> dict[str, Any]:
    known = {"ratio": ratio["median"], "interval": ratio["interval"], "p50": dict(p50)}
    return known | rounds.as_dict()


def measure(m: RunArtifacts, texts: Sequence[str], questions: int) -> dict[str, Any]:
    """The report's speed.gain; questions: how many share the seconds of timing."""
    assert m.unreduced is not None
    latency, reduce = m.section.validate_.latency, m.section.reduce
    assert reduce is not None
    assert reduce.least_gain is not None
    budget = Budget(latency.max_seconds, questions)
    asks = Question(50, 1 / reduce.least_gain)
    rounds = budget.rounds(asks, latency.iterations, speed.WARMUP)
    cell = Cell(m.section.target, latency, texts, reduce.gain_over)
    over = reduce.gain_over
    form = "the same form" if over == "same_form" else f"float ({cell.beside.computes_in})"
    say(f"validate: timing the smaller model beside the whole one in {form}")
    compared = cell.compared(Built(m.reference, m.unreduced), Built(m.source, m.model), rounds)
    goal = {"goal": reduce.latency_gain, "least": reduce.least_gain}
    return {**goal, "over": over, "form": form, **compared}


def table(m: RunArtifacts) -> dict[str, Any] | None:
    """What the report says of the sizes that were timed before; None where there are none."""
    return None if m.unreduced is None else read_json(m.unreduced.parent / TABLE)


def declared(m: RunArtifacts) -> tuple[str, float] | None:
    """The gate and its limit, where there is one."""
    least = m.section.reduce.least_gain if m.section.reduce else None
    return (NAME, least) if m.gains and least is not None else None


def gate(section: Mapping[str, Any], shared: int) -> Gate:
    """Of what `measure` gave. shared: as of speed.would_decide."""
    least, (low, high) = section["least"], section["interval"]
    verdict = "inconclusive"
    if high is not None and high < 1 / least:
        verdict = "pass"
    elif low is not None and low >= 1 / least:
        verdict = "fail"
    gain, interval = 1 / section["ratio"], (_over(high), _over(low))
    where = f"batch {section['batch']}, "
    where += (
        f"sequence {section['sequence']}"
        if "sequence" in section
        else (f"prompts of {section['prompt']} tokens")
    )
    message = (
        f"{gain:.2f} times as fast as the whole model in {section['form']} at {where}; "
        f"{section['goal']:g} is the goal, {least:.3g} the least that counts as met"
    )
    if verdict == "inconclusive":
        message += speed.would_decide(section, shared, f"so near {least:.3g}")
    if verdict == "fail":
        most, asked_for = breach(1 / low, least)
        message += (
            f"; {most} at most, {asked_for} is asked: set reduce.goal.latency_gain to what was "
            "reached, or run again with --remeasure if the machine was busy with other work"
        )
    return Gate(NAME, verdict, gain, least, interval, message)


def _over(end: float | None) -> float | None:
    return 1 / end if end else None
