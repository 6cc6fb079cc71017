"""Tests of the MLflow model's folder without MLflow: loader, metrics and parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from optimizer.foundation.errors import RecipeError
from optimizer.publish.address import parse
from optimizer.publish.hubs import pyfunc
from optimizer.publish.hubs.mlflow_model import (
    LONGEST_PARAMETER,
    build_model_files,
    collect_metrics,
    flatten_recipe,
)
from tests.package.bundles import small_bundle

TEXTS = ["a good film", "a bad one"]


@pytest.fixture
def answers(whole_bundle: Path) -> Iterator[Any]:
    loaded = pyfunc._load_pyfunc(str(whole_bundle))
    yield loaded
    loaded.bundle.close()


class Frame:
    """Do as pandas' DataFrame.to_dict does, which the loader calls."""

    def __init__(self, **columns: list[Any]) -> None:
        self.columns = columns

    def to_dict(self, kind: str) -> list[dict[str, Any]]:
        assert kind == "records"
        rows = zip(*self.columns.values(), strict=True)
        return [dict(zip(self.columns, row, strict=True)) for row in rows]


def test_the_loader_answers_as_the_bundles_own_harness(whole_bundle: Path, answers: Any) -> None:
    lines = small_bundle.python(whole_bundle, "-m", "harness", "predict", "--json", *TEXTS).stdout
    expected = [json.loads(line)["embedding"] for line in lines.splitlines()]
    nothing = float("nan")
    for given in (TEXTS, [{"text": t} for t in TEXTS], Frame(text=TEXTS, text_pair=[nothing] * 2)):
        answered = [answer["embedding"] for answer in answers.predict(given)]
        assert answered == [pytest.approx(row, abs=1e-6) for row in expected]


@pytest.mark.parametrize("given", ["a good film", {"text": "x"}, 3, [{"words": "x"}], [{}]])
def test_the_loader_says_which_input_it_takes(answers: Any, given: Any) -> None:
    with pytest.raises(ValueError, match="text"):
        answers.predict(given)
    with pytest.raises(ValueError, match="temperature"):
        answers.predict(TEXTS, {"temperature": 1})


def test_the_loader_refuses_sources_that_were_changed(whole_bundle: Path) -> None:
    # imported by no other test
    small_bundle.edited(whole_bundle, lambda m: m.update(licence="mit"))
    with (whole_bundle / "harness" / "bundle" / "bundle.py").open("a") as f:
        f.write("# changed\n")
    with pytest.raises(ImportError, match=r"harness/bundle/bundle.py is damaged"):
        pyfunc._load_pyfunc(str(whole_bundle))


def test_the_loader_imports_the_standard_library_only() -> None:
    import ast
    import sys

    tree = ast.parse(Path(pyfunc.__file__).read_text())
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {str(n.module) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in names} <= set(sys.stdlib_module_names)


def test_the_models_folder_names_loader_bundle_and_what_to_install(bundle: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_bytes())
    required = (bundle / "requirements.txt").read_text()
    files = build_model_files(manifest, required, "3.17.2")
    assert files == build_model_files(manifest, required, "3.17.2")
    model = yaml.safe_load(files["MLmodel"])
    flavour = model["flavors"]["python_function"]
    assert f"code/{flavour['loader_module']}.py" in files
    assert flavour["data"] == "bundle"
    assert [c["name"] for c in json.loads(model["signature"]["inputs"])] == ["text", "text_pair"]
    assert files["requirements.txt"].decode() == f"mlflow==3.17.2\n{required}"


def test_a_recipe_becomes_parameters_by_its_paths() -> None:
    recipe = {"name": "x", "quantize": {"bits": 8, "keep": ["a*", "b"]}, "reduce": None}
    flat = flatten_recipe({**recipe, "long": "x" * (LONGEST_PARAMETER + 1)})
    assert flat == {"name": "x", "quantize.bits": "8", "quantize.keep": '["a*", "b"]'}


def test_figures_have_names_that_mlflow_takes() -> None:
    section = {"metric": "ndcg@10", "candidate": {"value": 0.5}, "baseline": {"value": 0.6}}
    flat = collect_metrics([{"target": "cpu", "verdict": "pass", "quality": section}])
    assert (flat["cpu/ndcg_10"], flat["cpu/ndcg_10_float"], flat["cpu/passed"]) == (0.5, 0.6, 1.0)


@pytest.mark.parametrize(
    "text",
    [
        "mlflow:tiny",
        "mlflow:tiny:1.2",
        "mlflow:http://127.0.0.1:5000#tiny:1",
        f"mlflow:sqlite:///m.db#tiny@sha256:{'0' * 64}",
        "hf://my-org/tiny:production",
    ],
)
def test_an_address_is_written_as_it_was_read(text: str) -> None:
    address = parse(text)
    assert (str(address), address.name.endswith("tiny")) == (text, True)


@pytest.mark.parametrize("text", ["mlflow:", "mlflow:a/b", "mlflow:http://u:p@host#a", "mlflow:#a"])
def test_an_invalid_mlflow_address_is_refused(text: str) -> None:
    with pytest.raises(RecipeError):
        parse(text)
