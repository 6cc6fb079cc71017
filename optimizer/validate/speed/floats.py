"""What a target's own runtime offers in float on this machine, for must_beat_float to compare with.

Where a processor has bf16, a float model in it may be as fast as one in INT8, and as good. So the
gate's float is the fastest form whose answers keep the recipe's margins, judged on the same rows as
the candidate's. fp32 is the form that the margins are counted from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from optimizer.data.datasets import Sample, windows
from optimizer.foundation.progress import bar
from optimizer.foundation.verdicts import worst
from optimizer.harness import contract as contracts
from optimizer.harness.contract import Contract
from optimizer.recipe.schema import TargetSection
from optimizer.validate import decoder, served
from optimizer.validate.gates import Gate
from optimizer.validate.quality import answers, perplexity
from optimizer.validate.quality.quality import Answers
from optimizer.validate.run_artifacts import RunArtifacts

Compare = Callable[[answers.Reference, Answers], tuple[list[Gate], Any]]
"""The gates of a system's answers beside the reference's, and what was measured."""


@dataclass(frozen=True)
class Floats:
    """sections: {name in reports: how the float graph is run}, all timed. compared: those that
    must_beat_float is held against. figures: {name: {float, verdict, gates}} for the report."""

    sections: Mapping[str, TargetSection]
    compared: Sequence[str]
    figures: Mapping[str, Any] = field(default_factory=dict)


def plain(m: RunArtifacts) -> Floats:
    """Those of this machine, the first of them compared; no other is judged."""
    sections = served.float_forms(m.section.target)
    return Floats(sections, tuple(sections)[:1])


def judged(
    m: RunArtifacts, rows: Sequence[Sample], reference: answers.Reference, compare: Compare
) -> Floats:
    """The same, with every form judged that computes in less than the graph is stored in."""

    def gates_of(name: str, section: TargetSection) -> list[Gate]:
        with closing(_opened(m, section, m.contract)) as runner:
            own = answers.answer(m, runner, rows, f"validate: {name}")
        return compare(reference, own)[0]

    return _judged(m, gates_of)


def judged_on_windows(m: RunArtifacts, rows: Sequence[Sample]) -> Floats:
    """`judged` for text-generation: the recipe's gates on windows of the rows' text, beside the
    form that computes in what the graph is stored in."""
    settings = m.section.validate_
    contract = contracts.read(m.reference / "contract.json")
    some = windows(rows, m.encoder, contract, settings.sequence_length)

    def gates_of(name: str, section: TargetSection) -> list[Gate]:
        as_stored = section.model_copy(update={"float": section.float_type})
        with (
            closing(_opened(m, as_stored, contract)) as baseline,
            closing(_opened(m, section, contract)) as form,
        ):
            first, second = (decoder.OnnxDecoder(r, contract) for r in (baseline, form))
            scores = perplexity.score(
                bar(some, f"validate: {name}"),
                lambda ids: decoder.logits_of(first, ids),
                lambda ids: decoder.logits_of(second, ids),
            )
        return perplexity.judge(scores, settings)[0]

    return _judged(m, gates_of)


def _judged(m: RunArtifacts, gates_of: Callable[[str, TargetSection], list[Gate]]) -> Floats:
    sections = served.float_forms(m.section.target)
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
    return Floats(sections, compared, figures)


def _opened(m: RunArtifacts, section: TargetSection, contract: Contract) -> Any:
    return served.opened(section, m.reference_graph / "model.onnx", contract)
