"""`check` finds everything that `run` would refuse in its first minute, at once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from optimizer import checks
from optimizer.data import datasets, tables
from optimizer.foundation.errors import MachineError, OptimizeError, RecipeError, join
from optimizer.recipe.schema import DataSpec
from tests.conftest import write_tiny_bert

RECIPE = """\
name: t
model: {{source: {model}, task: feature-extraction}}
calibrate: {{data: {{source: csv, files: [{calibrate}]}}, samples: 8}}
quantize: {{method: rtn, weights: {{bits: 8, granularity: channel}}}}
targets: [{{runtime: onnxruntime, device: cpu}}]
validate: {{data: {{source: csv, files: [evaluate.csv]}}, metric: cosine}}
"""


def write(folder: Path, model: Path, calibrate: str = "calibrate.csv") -> Path:
    texts = {
        "calibrate.csv": ("good food", "bad phone", "a movie"),
        "evaluate.csv": ("a", "b", "c"),
    }
    for name, rows in texts.items():
        (folder / name).write_text("text\n" + "\n".join(rows) + "\n")
    file = folder / "recipe.yaml"
    file.write_text(RECIPE.format(model=model, calibrate=calibrate))
    return file


def errors_of(file: Path) -> list[str]:
    with pytest.raises(OptimizeError) as raised:
        checks.read(file, (), fetch=False, early=True)
    return [str(error) for error in (raised.value, *raised.value.further)]


def test_faults_of_config_weights_tokenizer_and_data_are_listed_together(
    tmp_path: Path, tiny_bert: Path
) -> None:
    model = shutil.copytree(tiny_bert, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    del config["model_type"]
    (model / "config.json").write_text(json.dumps(config))
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    for name in ("tokenizer.json", "vocab.txt"):
        (model / name).unlink(missing_ok=True)
    found = errors_of(write(tmp_path, model, "absent.csv"))
    words = ("model_type is missing", "weights are a pickle", "no tokenizer", "'absent.csv'")
    assert [word in error for word, error in zip(words, found, strict=True)] == [True] * 4


def test_an_overlap_of_data_is_found_before_anything_is_loaded(
    tmp_path: Path, tiny_bert: Path
) -> None:
    file = write(tmp_path, tiny_bert)
    shutil.copyfile(tmp_path / "calibrate.csv", tmp_path / "evaluate.csv")
    (error,) = errors_of(file)
    assert "also in the calibrate data" in error


def test_each_table_is_opened_once(
    tmp_path: Path, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def open_table(spec: DataSpec) -> Any:
        opened.append(spec.files)
        return tables.open_table(spec)

    monkeypatch.setattr(datasets, "open_table", open_table)
    checks.read(write(tmp_path, tiny_bert), (), fetch=False, early=True)
    assert sorted(opened) == [("calibrate.csv",), ("evaluate.csv",)]


def test_a_fault_behind_the_first_rows_is_told_once_with_its_place(
    tmp_path: Path, tiny_bert: Path
) -> None:
    file = write(tmp_path, tiny_bert)
    rows = [f"row {i},0" for i in range(datasets.CHECKED)] + ["the last,-1"]
    (tmp_path / "calibrate.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    labelled = "[calibrate.csv], columns: {text: text, label: label}, labels: [a, b]"
    file.write_text(file.read_text().replace("[calibrate.csv]", labelled))
    (error,) = errors_of(file)
    assert f"recipe.yaml:3: calibrate: data csv: calibrate.csv: row {len(rows) - 1}" in error


def test_every_error_of_the_schema_is_listed_with_its_line(tmp_path: Path, tiny_bert: Path) -> None:
    file = write(tmp_path, tiny_bert)
    text = file.read_text().replace("samples", "sampels").replace("cosine", "cosin")
    file.write_text(text)
    unknown, metric = errors_of(file)
    assert ":3: calibrate.sampels" in unknown
    assert ":6: validate.metric" in metric


def test_errors_of_model_and_data_are_listed_with_those_of_the_schema(
    tmp_path: Path, tiny_bert: Path
) -> None:
    model = shutil.copytree(tiny_bert, tmp_path / "model")
    (model / "model.safetensors").unlink()
    file = write(tmp_path, Path("model"), "absent.csv")
    file.write_text(file.read_text().replace("samples", "sampels"))
    unknown, weights, absent = errors_of(file)
    assert 'calibrate.sampels: unknown key; did you mean "samples"?' in unknown
    assert "no weights" in weights
    assert "no file 'absent.csv'" in absent


def test_a_gate_of_cosine_is_refused_for_a_model_of_one_number(tmp_path: Path) -> None:
    model = write_tiny_bert(tmp_path / "model", labels=("relevance",))
    file = write(tmp_path, model)
    file.write_text(file.read_text().replace("feature-extraction", "text-classification"))
    assert ":6: validate.metric: cosine compares directions" in errors_of(file)[0]


def test_wrong_input_comes_before_what_the_machine_lacks() -> None:
    machine, recipe = MachineError("no package"), RecipeError("no such key")
    error = join([machine, recipe, RecipeError("no such key")])
    assert error is recipe
    assert error.further == (machine,)
