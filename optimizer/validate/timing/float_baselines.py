"""Judge the float baselines (fp32, bf16, fp16) that a target's own runtime offers on this machine,
to find those that gate must_beat_float compares the candidate with.

On a processor with bf16, a float model in it may be as fast as one in INT8, and as accurate. So the
gate's float is the fastest baseline whose answers keep the recipe's margins, judged on the same
rows as the candidate's. The margins are counted from fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optimizer.data.datasets import Sample, cut_windows
from optimizer.foundation import state as compressed_state
from optimizer.foundation.progress import bar
from optimizer.foundation.state import CompressedState
from optimizer.foundation.verdicts import worst
from optimizer.harness import contract as contracts
from optimizer.harness.contract import Contract
from optimizer.lower import stage as lower
from optimizer.recipe.schema import TargetSection
from optimizer.validate import decoder, target_runner
from optimizer.validate.gates import Gate
from optimizer.validate.quality import answers, perplexity
from optimizer.validate.quality.quality import Answers
from optimizer.validate.run_artifacts import RunArtifacts

Compare = Callable[[answers.Reference, Answers], tuple[list[Gate], Any]]
"""(reference's answers, a system's answers) -> the system's quality gates, and the measurements."""


@dataclass(frozen=True)
class FloatBaselines:
    """Float baselines of a target on this machine.

    sections: {name in reports: section that runs the float graph}; all are timed
    compared: names of the baselines that must_beat_float compares the candidate with
    figures: {name: {float, verdict, gates}} for the report
    """

    sections: Mapping[str, TargetSection]
    compared: Sequence[str]
    figures: Mapping[str, Any] = field(default_factory=dict)


def list_baselines(m: RunArtifacts) -> FloatBaselines:
    """List the float baselines of this machine without judging any; only the first is compared
    with. The list is empty where the recipe times no float model."""
    if not m.section.validate_.latency.time_float:
        return FloatBaselines({}, ())
    sections = target_runner.float_baselines(m.section.target)
    return FloatBaselines(sections, tuple(sections)[:1])


def judge_baselines(
    m: RunArtifacts, rows: Sequence[Sample], reference: answers.Reference, compare: Compare
) -> FloatBaselines:
    """Judge the answers of every baseline coarser than the stored graph.

    rows: evaluation rows
    reference: the reference model's answers to them
    compare: function that judges two systems' answers
    """

    def gates_of(name: str, section: TargetSection) -> list[Gate]:
        with closing(_open(m, section, m.contract)) as runner:
            answered = answers.answer(m, runner, rows, f"validate: {name}")
        return compare(reference, answered)[0]

    return _judge(m, gates_of)


def judge_baselines_on_windows(m: RunArtifacts, rows: Sequence[Sample]) -> FloatBaselines:
    """Judge the baselines of a text-generation model by the recipe's gates, on windows of held-out
    text. They are compared with the baseline that computes in the type of the stored graph.

    rows: held-out texts
    """
    settings = m.section.validate_
    contract = contracts.read(m.reference / "contract.json")
    some = cut_windows(rows, m.encoder, contract, settings.sequence_length)

    def gates_of(name: str, section: TargetSection) -> list[Gate]:
        as_stored = section.model_copy(update={"float": section.float_type})
        with (
            closing(_open(m, as_stored, contract)) as baseline,
            closing(_open(m, section, contract)) as runner,
        ):
            first, second = (decoder.OnnxDecoder(r, contract) for r in (baseline, runner))
            scores = perplexity.score(
                bar(some, f"validate: {name}"),
                lambda ids: decoder.compute_logits(first, ids),
                lambda ids: decoder.compute_logits(second, ids),
            )
        return perplexity.judge(scores, settings)[0]

    return _judge(m, gates_of)


def _judge(m: RunArtifacts, gates_of: Callable[[str, TargetSection], list[Gate]]) -> FloatBaselines:
    sections = target_runner.float_baselines(m.section.target)
    compared, figures = [], {}
    for name, section in sections.items():
        coarser = section.computes_in != section.float_type
        gates = gates_of(name, section) if coarser else []
        verdict = worst(g.verdict for g in gates) if gates else "pass"
        compared += [name] if verdict == "pass" else []
        figures[name] = {
            "float": section.computes_in,
            "verdict": verdict,
            "gates": [g.as_dict() for g in gates],
        }
    return FloatBaselines(sections, compared, figures)


def write_float_file(m: RunArtifacts, section: TargetSection, folder: Path) -> Path:
    """Return the ONNX file of the reference as the target runs it uncompressed.

    folder: empty folder, for a file that is lowered for it
    """
    if not section.lowers_float:
        return m.reference_graph / "model.onnx"
    nothing, out = folder / "state", folder / "lowered"
    nothing.mkdir(parents=True)
    out.mkdir()
    compressed_state.write(CompressedState({}), nothing)
    lower.run(section, m.reference, nothing, m.reference_graph, out=out)
    return out / "model.onnx"


def _open(m: RunArtifacts, section: TargetSection, contract: Contract) -> Any:
    return target_runner.open_onnx(section, m.reference_graph / "model.onnx", contract)
