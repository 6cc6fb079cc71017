"""Judge section `embeddings` of a recipe, and write the contract with the forms that it proves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optimizer.data.datasets import digest_rows
from optimizer.data.sample import Sample
from optimizer.harness.contract import Contract
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.recipe.schema import Validation
from optimizer.recipe.stage_sections import LEARNING
from optimizer.validate import target_runner
from optimizer.validate.gates import Gate
from optimizer.validate.run_artifacts import RunArtifacts
from optimizer.validate.search import corpus, forms
from optimizer.validate.search.corpus import Corpus


def digest_sets(section: Validation) -> dict[str, str]:
    """{place in the recipe: digest of its rows}; {} without the section."""
    if section.embeddings is None:
        return {}
    used = {
        corpus.QUERIES: section.embeddings.queries,
        corpus.DOCUMENTS: section.embeddings.documents,
    }
    return {name: digest_rows(spec) for name, spec in used.items()}


def read(
    section: Validation, source: Path, contract: Contract, data: Mapping[str, Sequence[Sample]]
) -> Corpus | None:
    """Read the corpus that a search is judged on; None without the section. Raises the errors of
    corpus.read.

    source: folder of load
    data: rows by their place in the recipe
    """
    if section.embeddings is None:
        return None
    ids = load_tokenizer(source / "checkpoint", contract).ids
    learned = [row for name in LEARNING for row in data.get(name, ())]
    return corpus.read(section.embeddings, contract, ids, learned)


def judge(
    m: RunArtifacts,
    data: Mapping[str, Sequence[Sample]],
    device: str,
    report: dict[str, Any],
    out: Path,
) -> list[Gate]:
    """Return the gates, fill in the report's `embeddings`, and write contract.json into `out`.

    device: device of the candidate
    """
    texts = read(m.section, m.source, m.contract, data)
    if texts is None:
        return []
    if unanswered := target_runner.explain_not_answered(m):
        return [Gate("embeddings", "inconclusive", None, None, None, unanswered)]
    gates, report["embeddings"], quantized = forms.judge(m, texts, device)
    document = json.loads((m.source / "contract.json").read_text("utf-8"))
    document["embedding"] = {**(document.get("embedding") or {}), "quantized": quantized}
    written = Contract.from_json(document).to_json()
    (out / "contract.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return gates
