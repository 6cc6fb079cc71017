"""A recipe with a reduce section, from the checkpoint to its verdict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optimizer import checks, pipeline
from optimizer.foundation.errors import DataError, RecipeError
from optimizer.recipe import file as recipe_file
from optimizer.store import Store
from tests.conftest import sentences, write_rows, write_tiny_bert, write_tiny_recipe

REDUCE = "reduce: {goal: {keep: 0.7}, methods: [width, depth]}\nquantize:\n"
PORTABLE = "  - {runtime: onnxruntime, device: cpu, threads: 1}\n"
FOLDER = "  - {runtime: compressed-tensors, float: fp32}\n"


LEAKED = "nobody else says this about that film."
LEARN = "{data: {source: json, files: [learn.jsonl]}, held_out: 16, batch_size: 8, steps: 20}"
RECOVER = REDUCE.replace("depth]}", f"depth], recover: {LEARN}}}")


def run(
    folder: Path, target: str, margin: float, sections: str = REDUCE
) -> tuple[pipeline.Outcome, dict[str, Any]]:
    """(outcome of the pipeline on three blocks, report of its one target)."""
    model = write_tiny_bert(folder / "model", layers=3)
    file = write_tiny_recipe(folder / "recipe", model)
    write_rows(file.parent / "learn.jsonl", 100, seed=9)
    text = file.read_text().replace("quantize:\n", sections, 1).replace(PORTABLE, target)
    file.write_text(text.replace("max_drop: 0.1", f"max_drop: {margin}"))
    outcome = pipeline.run(recipe_file.read(file), Store(folder / "store"))
    (built,) = outcome.built
    return outcome, json.loads((built.report.path / "report.json").read_text())


@pytest.mark.parametrize("margin", [0.9, 0.0001])
def test_quality_is_judged_against_the_model_that_was_given(margin: float, tmp_path: Path) -> None:
    """The message of a smaller model that misses its margin says what to do."""
    outcome, report = run(tmp_path, FOLDER, margin)
    hops = {entry["hop"]: entry["ok"] for entry in report["ledger"]}
    assert list(hops)[:3] == ["load", "reduce", "fold"]
    assert all(ok is not False for ok in hops.values())
    assert report["quality"]["cosine"]["mean"] < 0.999  # the smaller one is far from it
    (gate,) = (g for g in report["gates"] if g["name"] == "quality.cosine")
    assert ("; add reduce.recover" in gate["message"]) == (margin < 0.9)
    assert pipeline.verdict(outcome.built) == ("pass" if margin == 0.9 else "fail")
    assert (outcome.bundle is not None) == (margin == 0.9)
    before, after = report["reduced"]["weights"]["blocks"]
    assert 0 < after <= 0.7 * before


@pytest.mark.parametrize(
    ("sections", "steps"),
    [
        (f"qat: {LEARN}\n{RECOVER}", ["reduce", "recover", "qat"]),
        (f"qat: {LEARN}\nquantize:\n", ["qat"]),
    ],
    ids=["all", "qat alone"],
)
def test_what_was_learned_is_proven_and_told(
    sections: str, steps: list[str], tmp_path: Path
) -> None:
    outcome, report = run(tmp_path, FOLDER, 0.9, sections)
    hops = {entry["hop"]: entry["ok"] for entry in report["ledger"]}
    assert list(hops)[: len(steps) + 2] == ["load", *steps, "fold"]
    assert all(ok is not False for ok in hops.values())
    trainings = [training["hop"] for training in report["learned"]]
    assert trainings == [step for step in steps if step != "reduce"]
    assert (report["reduced"] is not None) == ("reduce" in steps)
    assert outcome.bundle is not None
    page = (outcome.bundle.path / "bundle" / "report.html").read_text()
    assert "Quantization-aware training" in page


@pytest.mark.parametrize(
    "leak", [{"text": LEAKED}, {"text": "Another text.", "text_pair": LEAKED.upper()}]
)
def test_learning_from_what_judges_is_refused(leak: dict[str, str], tmp_path: Path) -> None:
    """Also where calibrate's whole data set is what qat learns from, and on either side."""
    model = write_tiny_bert(tmp_path / "model")
    file = write_tiny_recipe(tmp_path / "recipe", model)
    (file.parent / "evaluate.jsonl").write_text(
        "".join(json.dumps({"text": t, "label": 0}) + "\n" for t in (LEAKED, *sentences(63, 7)))
    )
    rows = [{"text": t, "text_pair": "A pair."} for t in sentences(80, 8)]
    text = "".join(json.dumps(row) + "\n" for row in [*rows, {"text_pair": "A pair.", **leak}])
    (file.parent / "calibrate.jsonl").write_text(text)
    columns = "columns: {text: text, text_pair: text_pair}"
    recipe = file.read_text().replace("[calibrate.jsonl]", f"[calibrate.jsonl], {columns}", 1)
    learn = "qat: {samples: 90, held_out: 16, batch_size: 8, steps: 20}\n"
    file.write_text(recipe.replace("samples: 16", "samples: 2", 1) + learn)
    with pytest.raises(DataError, match="is also in the"):
        pipeline.run(recipe_file.read(file), Store(tmp_path / "store"))


@pytest.mark.slow
def test_speed_and_size_are_compared_with_the_model_that_was_given(tmp_path: Path) -> None:
    outcome, report = run(tmp_path, PORTABLE, 0.9)
    graphs = [p / "model.onnx" for p in (tmp_path / "store" / "export").iterdir() if p.is_dir()]
    largest = max(
        sum(f.stat().st_size for f in graph.parent.glob("model.onnx*")) for graph in graphs
    )
    assert len(graphs) == 2
    assert report["speed"]["size"]["float_bytes"] == largest
    assert outcome.bundle is not None


def with_a_student(folder: Path, changes: dict[str, int], metric: str) -> Path:
    """A recipe whose student is the model's config with changes."""
    model = write_tiny_bert(folder / "model", layers=3)
    file = write_tiny_recipe(folder / "recipe", model)
    write_rows(file.parent / "learn.jsonl", 100, seed=9)
    student = folder / "student"
    student.mkdir()
    config = json.loads((model / "config.json").read_text())
    (student / "config.json").write_text(json.dumps({**config, **changes}))
    section = f"reduce: {{student: {student}, recover: {LEARN}}}\nquantize:\n"
    text = file.read_text().replace("quantize:\n", section, 1).replace(PORTABLE, FOLDER)
    file.write_text(
        text.replace("metric: cosine", metric).replace("max_drop: 0.1", "max_drop: 0.9")
    )
    return file


def test_a_student_of_another_width_is_judged_by_what_has_a_width_of_its_own(
    tmp_path: Path,
) -> None:
    file = with_a_student(
        tmp_path, {"num_hidden_layers": 1, "hidden_size": 32}, "metric: retrieval"
    )
    outcome = pipeline.run(recipe_file.read(file), Store(tmp_path / "store"))
    (built,) = outcome.built
    report = json.loads((built.report.path / "report.json").read_text())
    assert report["quality"]["cosine"] is None
    hops = {entry["hop"]: entry for entry in report["ledger"]}
    assert all(entry["ok"] is not False for entry in hops.values())
    assert hops["reduce"]["measured"] is None
    assert "no law of structure" in hops["reduce"]["unproven"]
    (gate,) = (g for g in report["gates"] if g["name"] == "ledger")
    assert "reduce: no part of a student is cut out" in gate["message"]
    assert outcome.bundle is not None
    manifest = json.loads((outcome.bundle.path / "bundle" / "manifest.json").read_text())
    assert manifest["source"]["student"]["source"] == str(tmp_path / "student")
    assert "3 blocks, 64 wide" in (outcome.bundle.path / "bundle" / "report.html").read_text()


def test_a_student_of_another_vocabulary_is_refused_by_check(tmp_path: Path) -> None:
    file = with_a_student(tmp_path, {"vocab_size": 9}, "metric: cosine")
    with pytest.raises(RecipeError, match=r"reduce\.student: the student's vocabulary has 9"):
        checks.read(file, (), fetch=False)


@pytest.mark.parametrize(
    ("metric", "where"),
    [("metric: cosine", "metric"), ("metric: retrieval\n  min_cosine: 0.5", "min_cosine")],
)
def test_a_cosine_between_widths_is_refused_before_anything_learns(
    metric: str, where: str, tmp_path: Path
) -> None:
    file = with_a_student(tmp_path, {"hidden_size": 32}, metric)
    with pytest.raises(RecipeError, match=rf"validate\.{where}: the student's embeddings have 32"):
        pipeline.run(recipe_file.read(file), Store(tmp_path / "store"))
    assert not (tmp_path / "store" / "recover").exists()
