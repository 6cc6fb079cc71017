"""A lock says what a recipe stands for, and finds what changed since."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from onnx.helper import make_node
from safetensors.torch import save_file

from optimizer.cli import main
from optimizer.load.stage import origin
from optimizer.recipe.schema import Model
from tests.conftest import write_tiny_recipe
from tests.load.onnx_model import exported
from tests.package.bundles import small_bundle


def optimize(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


@pytest.fixture
def recipe(tmp_path: Path, tiny_bert: Path) -> Path:
    """A recipe with a separate model, and its lock in the same folder."""
    model = Path(shutil.copytree(tiny_bert, tmp_path / "model"))
    file = write_tiny_recipe(tmp_path / "recipe", model)
    assert optimize("lock", file).exit_code == 0
    return file


def again(recipe: Path) -> Result:
    return optimize("lock", recipe, "--check", recipe.with_name("recipe.lock.json"))


def test_a_lock_is_the_same_bytes_while_nothing_changes(recipe: Path) -> None:
    lock = recipe.with_name("recipe.lock.json")
    before = lock.read_bytes()
    assert again(recipe).exit_code == 0
    assert optimize("lock", recipe).exit_code == 0
    assert lock.read_bytes() == before


@pytest.mark.parametrize("what", ["recipe", "checkpoint", "data"])
def test_what_changed_since_is_named(recipe: Path, what: str) -> None:
    if what == "recipe":
        recipe.write_text(recipe.read_text().replace("range: minmax", "range: mse"))
    elif what == "checkpoint":
        (recipe.parent.parent / "model" / "README.md").write_text("---\nlicense: mit\n---\n")
    else:
        rows = recipe.with_name("evaluate.jsonl")
        rows.write_text("".join(rows.read_text().splitlines(keepends=True)[1:]))
    expected = {
        "recipe": "recipe quantize.activations.range: 'minmax' before, 'mse' now",
        "checkpoint": "checkpoint README.md: ",
        "data": "data validate: ",
    }
    result = again(recipe)
    assert (result.exit_code, expected[what] in result.stderr) == (2, True), result.stderr


def test_a_bundles_manifest_is_a_lock(recipe: Path, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    bundle = small_bundle.make(tmp_path / "made") / "bundle"
    result = optimize("lock", recipe, "--check", bundle / "manifest.json")
    assert (result.exit_code, "checkpoint" in result.stderr) == (2, True)


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"recipe": 1, "source": {"files": {}}}'])
def test_what_is_no_lock_is_refused(recipe: Path, tmp_path: Path, text: str) -> None:
    file = tmp_path / "lock"
    file.write_text(text)
    result = optimize("--json", "lock", recipe, "--check", file)
    document = json.loads(result.stdout)
    assert (result.exit_code, "not a lock" in document["found"]) == (2, True)


@pytest.mark.parametrize("command", [["run"], ["step", "--outputs", "OUT"]], ids=["run", "step"])
@pytest.mark.parametrize("how", ["--locked", "--lock"])
def test_a_run_is_refused_before_any_work_where_its_lock_says_otherwise(
    recipe: Path, tmp_path: Path, command: list[str], how: str
) -> None:
    lock = recipe.with_name("recipe.lock.json")
    if how == "--lock":
        lock = lock.rename(tmp_path / "another.json")
    (recipe.parent.parent / "model" / "README.md").write_text("---\nlicense: mit\n---\n")
    words = [tmp_path / "out" if word == "OUT" else word for word in command]
    words += [recipe, "--store", tmp_path / "store", how, *([lock] if how == "--lock" else [])]
    result = optimize(*words)
    assert (result.exit_code, "checkpoint README.md: " in result.stderr) == (2, True)
    assert not (tmp_path / "store").exists()


def test_a_run_goes_on_where_its_lock_agrees(recipe: Path, tmp_path: Path) -> None:
    words = ["run", recipe, "--store", tmp_path / "store", "--locked", "--until", "load"]
    result = optimize(*words)
    assert result.exit_code == 0, result.stderr
    assert optimize(*words, "--set", "quantize.activations.range=mse").exit_code == 2


def test_a_lock_that_is_not_there_is_an_error_that_says_how_to_write_one(
    recipe: Path, tmp_path: Path
) -> None:
    recipe.with_name("recipe.lock.json").unlink()
    result = optimize("run", recipe, "--store", tmp_path / "store", "--locked")
    assert (result.exit_code, "optimize lock RECIPE" in result.stderr) == (2, True)


def test_a_lock_names_the_files_of_an_onnx_file_and_of_a_torch_module(tmp_path: Path) -> None:
    file = exported.by_hand(
        tmp_path / "m.onnx", [make_node("MatMul", ["x", "W"], ["y"])], {"W": exported.weights(8, 4)}
    )
    assert set(origin(Model(source=str(file), task="tensors"))["files"]) == {"m.onnx"}
    (tmp_path / "net.py").write_text("1 / 0")
    save_file({"a": torch.ones(1)}, tmp_path / "w.safetensors")
    module = Model(
        module="net:build",
        weights="w.safetensors",
        example="net:example",
        trust_code=True,
        task="tensors",
        base=str(tmp_path),
    )
    assert set(origin(module)["files"]) == {"net.py", "w.safetensors"}
