"""Entries and refusals of a plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from optimizer.cli import main
from optimizer.commands.build import predictions
from tests.conftest import write_tiny_recipe

RULE = "quantize.layers=[{modules: ['*.nothing'], weights: {bits: 8}}]"


def optimize(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    return write_tiny_recipe(tmp_path_factory.mktemp("recipe"), tiny_bert)


def test_every_step_is_foretold_with_its_needs(recipe: Path, tmp_path: Path) -> None:
    made = optimize("--json", "plan", str(recipe), "--store", str(tmp_path))
    entries = json.loads(made.stdout)
    assert [e["stage"] for e in entries][:2] == ["load", "compress"]
    assert {e["what"] for e in entries} == {"run"}
    assert all(e["memory"] > 0 for e in entries[:2])
    assert list(tmp_path.iterdir()) == []


def test_a_row_names_the_target_that_its_step_is_for(recipe: Path, tmp_path: Path) -> None:
    two = "targets=[{runtime: onnxruntime}, {runtime: openvino}]"
    words = ("plan", str(recipe), "--store", str(tmp_path), "--set", two)
    entries = json.loads(optimize("--json", *words).stdout)
    targets = {s: [e["target"] for e in entries if e["stage"] == s] for s in ("load", "lower")}
    assert targets == {"load": [""], "lower": ["onnxruntime-cpu", "openvino-cpu"]}
    rows = predictions.format_entries(entries).splitlines()
    assert [" onnxruntime-cpu: " in row for row in rows if row.startswith("lower")] == [True, False]


def test_a_rule_that_matches_nothing_is_refused_once_the_model_is_there(
    recipe: Path, tmp_path: Path
) -> None:
    asked = (str(recipe), "--store", str(tmp_path), "--set", RULE)
    assert optimize("run", *asked, "--until", "load").exit_code == 0
    refused = optimize("plan", *asked)
    assert refused.exit_code == 2
    assert "*.nothing" in refused.stderr


def test_other_code_is_named_as_why_a_step_runs_again(recipe: Path, tmp_path: Path) -> None:
    asked = (str(recipe), "--store", str(tmp_path))
    assert optimize("run", *asked, "--until", "load").exit_code == 0
    (finished,) = tmp_path.glob("load/*/made_from.json")
    document = json.loads(finished.read_text()) | {"code": "of another version"}
    finished.write_text(json.dumps(document))
    finished.parent.rename(finished.parent.with_name("of-another-version"))
    load = json.loads(optimize("--json", "plan", *asked).stdout)[0]
    assert (load["what"], load["why"]) == ("run", "changed: the code of this step")


def test_a_run_of_another_recipe_is_not_why_a_step_runs(recipe: Path, tmp_path: Path) -> None:
    asked = (str(recipe), "--store", str(tmp_path))
    other = ("--set", "name=another", "--set", "model.max_length=50")
    assert optimize("run", *asked, "--until", "load", *other).exit_code == 0
    longer = ("--set", "model.max_length=40")
    load = json.loads(optimize("--json", "plan", *asked, *longer).stdout)[0]
    assert load["why"] == "new for recipe tiny"
    assert optimize("run", *asked, "--until", "load").exit_code == 0
    load = json.loads(optimize("--json", "plan", *asked, *longer).stdout)[0]
    assert load["why"] == "changed: max_length: None -> 40"


def test_a_long_value_and_many_changes_stay_one_line(tmp_path: Path) -> None:
    def change(old: object, new: object) -> str:
        (tmp_path / "x").mkdir(exist_ok=True)
        finished = {"recipe": "r", "section": old}
        (tmp_path / "x" / "made_from.json").write_text(json.dumps(finished))
        return predictions._explain_run({"section": new}, tmp_path, "r")

    assert len(change({"a": "x " * 500}, {"a": "y " * 500})) < 100
    new = dict.fromkeys("abcde", 2)
    named = "changed: a: 1 -> 2, b: 1 -> 2, c: 1 -> 2 and 2 more"
    assert change(dict.fromkeys("abcde", 1), new) == named
