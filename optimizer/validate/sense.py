"""Does what goes in make sense? The report's `sense`:

texts      {place in the recipe: text_sense.TextSense as a dict, with its warnings}; of a model of
           images `images`, and image_sense.ImageSense
tokenizer  sha256 of the file that the texts were judged with
reference  the float model against chance: {metric, verdict, value, expected, reach, p, ...,
           warnings}; verdict: above chance, too few rows to tell, not labelled, below chance
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optimizer.data import input_sense
from optimizer.data.datasets import Sample
from optimizer.foundation.progress import say
from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.recipe.schema import Validation
from optimizer.store import digest_file
from optimizer.validate import sense_checks
from optimizer.validate.gates import Gate
from optimizer.validate.quality.answers import Reference
from optimizer.validate.run_artifacts import RunArtifacts


def inputs(
    section: Validation, source: Path, data: Mapping[str, Sequence[Sample]]
) -> dict[str, Any]:
    """`texts` (or `images`) and `tokenizer` of the report. source: the load stage's folder; data:
    rows by their place in the recipe. Raises DataError where the model cannot tell the inputs of
    a set apart."""
    contract = contracts.read(source / "contract.json")
    kind, sense = tasks.of(contract).inputs, input_sense.of(contract)
    encoder = kind.open(source / "checkpoint", contract)
    sets: dict[str, Any] = {}
    own = section.reduce.calibrate if section.reduce else None
    for name, rows in data.items():
        calibrate = {"calibrate": section.calibrate, "reduce.calibrate": own}.get(name)
        length = calibrate.sequence_length if calibrate else None
        measured = sense.measure(rows, contract, encoder, length)
        sense.check(measured, name)
        sets[name] = {**measured.as_dict(), "warnings": sense.warnings(measured, name)}
    document = {f"{kind.name}s": sets}
    if contract.tokenizer is None:
        return document
    file = source / "checkpoint" / contract.tokenizer.file
    return {**document, "tokenizer": digest_file(file)}


def before(
    m: RunArtifacts,
    data: Mapping[str, Sequence[Sample]],
    rows: Sequence[Sample],
    answered: Reference | None,
) -> dict[str, Any]:
    """The report's sense, before anything is proven; without `reference` of text-generation.

    rows: validate.data's, with the model's label ids; answered: the float model's answers to them
    (answers.reference). Raises DataError for a float model that answers every text alike, or is
    within chance on labelled rows, and what `inputs` raises.
    """
    texts = inputs(m.section, m.source, data)
    if answered is None:
        return texts
    settings, (baseline, train) = m.section.validate_, answered
    terms = max(int(p.shape[-1]) for p in m.parameters.values() if p.ndim > 1)
    sense_checks.answers_differ(baseline.text, terms)
    if settings.metric == "agreement":
        sense_checks.agreement_can_be_lost(baseline, settings.max_drop)
    labelled = sense_checks.labelled_answers(
        settings.metric, tasks.of(m.contract), rows, baseline, train
    )
    other = None if labelled else sense_checks.agreement(settings.metric, rows, baseline)
    names = m.contract.labels
    section = sense_checks.above_chance(
        settings.metric, labelled, other, names, settings.confidence
    )
    warn(section["warnings"])
    return {**texts, "reference": section}


def after(m: RunArtifacts, judged: Sequence[Gate], quality: dict[str, Any]) -> dict[str, Any]:
    """What only the comparison shows: `reference` of text-generation. judged: the quality gates.
    Raises DataError where all examples are one."""
    sense_checks.examples_differ(judged, quality["examples"])
    if not tasks.of(m.contract).generates:
        return {}
    section = sense_checks.language_model(quality, m.contract.decoder.vocabulary)
    warn(section["warnings"])
    return {"reference": section}


def warn(sentences: Sequence[str]) -> None:
    """Print what is odd and refuses nothing."""
    for sentence in sentences:
        say(f"warning: {sentence}")
