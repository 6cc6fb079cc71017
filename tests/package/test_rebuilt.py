"""Made again: equal, equal but for what is measured, or different, and why."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from optimizer.cli import main
from optimizer.harness.bundle.manifest import read_manifest
from optimizer.package.rebuilt import compare
from tests.conftest import write_tiny_recipe
from tests.package.bundles import small_bundle

Json = dict[str, Any]
MODEL = "model/onnxruntime-cpu/model.onnx"


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Json:
    return read_manifest(small_bundle.make(tmp_path_factory.mktemp("made")) / "bundle")


def changed(manifest: Json, change: Callable[[Json], object]) -> Json:
    other = copy.deepcopy(manifest)
    change(other)
    return other


def test_a_bundle_is_equal_to_itself_to_the_bit(manifest: Json) -> None:
    rebuilt = compare(manifest, manifest)
    assert (rebuilt.equal, rebuilt.files, rebuilt.inputs) == ("to the bit", (), ())


@pytest.mark.parametrize("name", ["report.json", "engines/onnxruntime-cpu/engine.json"])
def test_what_is_measured_may_differ_and_is_named(manifest: Json, name: str) -> None:
    other = changed(manifest, lambda m: m["files"][name].update(sha256="0" * 64))
    rebuilt = compare(manifest, other)
    assert (rebuilt.equal, rebuilt.measured) == ("but for what is measured", (name,))


CHANGES: dict[str, Callable[[Json], object]] = {
    f"{MODEL} differs": lambda m: m["files"][MODEL].update(sha256="0" * 64),
    "LICENSE is missing now": lambda m: m["files"].pop("LICENSE"),
    "x is new": lambda m: m["files"].update(x={**m["files"]["LICENSE"], "size": 1}),
    "the contracts differ": lambda m: m["contract"].update(pooling="cls"),
    "engine onnxruntime-cpu: in only one": lambda m: m.update(engines=[]),
    "engine onnxruntime-cpu: threads is 9": lambda m: m["engines"][0].update(threads=9),
}


@pytest.mark.parametrize("line", CHANGES)
def test_what_answers_may_not_differ(manifest: Json, line: str) -> None:
    rebuilt = compare(manifest, changed(manifest, CHANGES[line]))
    assert rebuilt.equal == "no"
    assert any(found.startswith(line) for found in rebuilt.files), rebuilt.files


INPUTS: dict[str, Callable[[Json], object]] = {
    "recipe quantize.method: 'rtn' before, 'gptq' now": lambda m: m["recipe"]["quantize"].update(
        method="gptq"
    ),
    "package onnx: ": lambda m: m["packages"].update(onnx="0"),
    "data validate: ": lambda m: m["calibration"].update(validate="0" * 64),
    "checkpoint x: None before": lambda m: m["source"]["files"].update(x={"sha256": "0" * 64}),
}


@pytest.mark.parametrize("line", INPUTS)
def test_what_went_in_that_was_different_is_named(manifest: Json, line: str) -> None:
    rebuilt = compare(manifest, changed(manifest, INPUTS[line]))
    (found,) = rebuilt.inputs
    assert found.startswith(line)


def test_how_long_something_was_timed_explains_nothing(manifest: Json) -> None:
    other = changed(manifest, lambda m: m["recipe"]["validate"]["latency"].update(iterations=9))
    assert compare(manifest, other).inputs == ()


@pytest.mark.slow
def test_a_recipe_makes_its_bundle_again(tmp_path: Path, tiny_bert: Path) -> None:
    recipe = write_tiny_recipe(tmp_path / "recipe", tiny_bert)
    places = ["--store", tmp_path / "store", "--artifacts", tmp_path / "artifacts"]
    CliRunner().invoke(main, [str(w) for w in ("run", recipe, *places)])
    bundle = tmp_path / "artifacts/tiny/1"

    def again(file: Path, work: str) -> tuple[int, Json]:
        words = ["--json", "verify-rebuild", bundle, file, "--work", tmp_path / work]
        result = CliRunner().invoke(main, [str(w) for w in words])
        return result.exit_code, json.loads(result.stdout)

    code, document = again(recipe, "same")
    assert (code, document["equal"]) == (0, "but for what is measured"), document
    assert document["inputs"] == []
    locked = CliRunner().invoke(
        main, [str(w) for w in ("lock", recipe, "--check", bundle / "manifest.json")]
    )
    assert locked.exit_code == 0, locked.stderr
    other = recipe.with_name("other.yaml")
    other.write_text(recipe.read_text().replace("range: minmax", "range: mse"))
    code, document = again(other, "other")
    assert (code, document["equal"]) == (3, "no")
    assert any("quantize.activations.range" in line for line in document["inputs"])
    assert any(MODEL in line for line in document["files"])
