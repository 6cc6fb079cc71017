"""Forms are judged by a search, and the contract gets the ranges that were judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.tasks.embeddings.sentence_embedding import with_form
from optimizer.recipe.data import Calibrate, DataSpec
from optimizer.recipe.embeddings import Embeddings
from optimizer.validate.quality.answers import TorchRunner
from optimizer.validate.search import stage
from optimizer.validate.search.forms import _embed
from tests.conftest import sentences
from tests.validate.runs import Run


def spec(file: Path, rows: list[dict[str, str]], **columns: str) -> DataSpec:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataSpec(source="json", files=(str(file),), columns=columns)


@pytest.mark.parametrize("labelled", [True, False])
def test_forms_are_gated_and_written_to_the_contract(
    runs: dict[str, Run], labelled: bool, tmp_path: Path
) -> None:
    library = pytest.importorskip("sentence_transformers.util.quantization")
    m = runs["static"].materials()
    texts = list(dict.fromkeys(sentences(160, seed=21)))
    pairs = [{"query": f"{t} good", "document": t} for t in texts[:60]]
    columns = {"text": "query", **({"text_pair": "document"} if labelled else {})}
    made = Embeddings(
        type=("int8", "binary"),
        dimensions=(64, 12),
        queries=spec(tmp_path / "q.jsonl", pairs, **columns),
        documents=spec(tmp_path / "d.jsonl", [{"text": t} for t in texts], text="text"),
        k=5,
        max_drop=0.6,
    )
    calibrate = Calibrate(
        data=spec(tmp_path / "c.jsonl", [{"text": t} for t in sentences(16)], text="text")
    )
    m.section = m.section.model_copy(update={"embeddings": made, "calibrate": calibrate})
    report: dict[str, Any] = {}
    gates = stage.judge(m, {}, "cpu", report, tmp_path)
    assert [g.name for g in gates][:3] == [
        "embeddings.recall.int8.64",
        "embeddings.ndcg.int8.64",
        "embeddings.recall.int8.12",
    ]
    by_form = {(f["type"], f["dimensions"]): f for f in report["embeddings"]["forms"]}
    assert {f: part["bytes"] for f, part in by_form.items()} == {
        ("int8", 64): 64,
        ("int8", 12): 12,
        ("binary", 64): 8,
        ("binary", 12): 2,
    }
    recalls = {f: part["recall"]["candidate"]["value"] for f, part in by_form.items()}
    assert recalls[("int8", 64)] > recalls[("binary", 12)] > 0
    assert report["embeddings"]["float"]["recall"] == (
        1 if not labelled else pytest.approx(1, abs=0.2)
    )
    contract = contracts.read(tmp_path / "contract.json")
    forms = contract.vectors.quantized
    assert forms is not None
    learned = _embed(m, TorchRunner(m), sentences(16), "document", "")
    ranges = np.array(forms.ranges["64"], np.float32)
    np.testing.assert_array_equal(ranges, [learned.min(0), learned.max(0)])
    (answer,) = tasks.build_answers(with_form(contract, "int8", 64), learned[:1], [None])
    expected = library.quantize_embeddings(learned[:1], "int8", ranges=ranges)
    assert answer["embedding"] == expected[0].tolist()
