"""Pruned weights on their way to a runtime: dense and said so, or with kernels that skip zeros."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optimizer.lower.trt import build
from optimizer.recipe.schema import Recipe, TensorRTTarget
from optimizer.validate.ledger import ledger
from tests.validate.runs import Run, for_tensorrt, make, recipe


@pytest.fixture(scope="module")
def run(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An encoder whose float weights are 2:4, in the graph itself."""
    root = tmp_path_factory.mktemp("sparse_lowering")
    (root / "data").mkdir()
    plain = recipe(str(tiny_bert), root / "data", {}, "sentence-embedding")
    document = plain.model_dump(by_alias=True, exclude_unset=True)
    document["validate"]["quantization_budget"] = 2.0
    zeros = {"sparsity": {"method": "magnitude"}, "quantize": {"method": "float_weights"}}
    return make(root, Recipe.model_validate(document | zeros))


def test_every_hop_holds_and_says_what_it_judged(run: Run) -> None:
    entries = ledger.run(run.materials())
    assert [(e.hop, e.problems) for e in entries if e.ok is not True] == []


def test_what_onnx_runtime_makes_of_zeros_is_said(run: Run) -> None:
    document = json.loads((run.folder("model") / "lowering.json").read_text())
    assert set(document["sparsity"].values()) == {"2:4"}
    assert len(document["sparsity"]) == 12
    assert document["notes"] == [
        "12 modules are sparse (2:4): ONNX Runtime stores their zeros and multiplies by them, so "
        "sparsity saves neither space nor time; an archive of the file is smaller"
    ]


def test_tensorrt_is_told_of_2_to_4_and_what_it_does_not_say_is_unknown(
    run: Run, tmp_path: Path
) -> None:
    pytest.importorskip("tensorrt_rtx", reason="pip install tensorrt-rtx")
    built = for_tensorrt(run, tmp_path)
    document = json.loads((built.folder("engine") / "engine.json").read_text())
    assert document["fit"]["sparse_weights"] is True
    silent = [s for s in document["inspected"]["unknown"] if "2:4" in s]
    assert len(silent) == (not document["network"]["sparse"])


def test_a_model_without_2_to_4_is_not_built_with_sparse_kernels() -> None:
    section = TensorRTTarget(runtime="tensorrt-rtx")
    refused = TensorRTTarget(runtime="tensorrt-rtx", sparse_weights=False)
    assert build._options(section, {"a": "2:4"}).sparse_weights
    assert not build._options(section, {}).sparse_weights
    assert not build._options(section, {"a": "unstructured 0.5"}).sparse_weights
    assert not build._options(refused, {"a": "2:4"}).sparse_weights


def test_an_engine_that_names_its_sparse_layers_is_quoted() -> None:
    inspected: dict[str, list[str]] = {"known": [], "unknown": []}
    line = "(Sparsity) Chose 3 layer(s) using sparse tactics: a, b, c"
    build._sparse_kernels(inspected, [line])
    assert line in inspected["known"][0]
    assert inspected["unknown"] == []
