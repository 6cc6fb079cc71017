"""A recipe with two sides is refused where they do not fit, by messages that name section texts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from optimizer import checks
from optimizer.foundation.errors import OptimizeError
from tests.package.bundles import pair_bundle


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pair_bundle.write_recipe(tmp_path_factory.mktemp("texts") / "clip", "clip")


def test_both_sides_are_checked_and_the_side_of_texts_is_a_recipe(recipe: Path) -> None:
    read, _ = checks.read(recipe, (), fetch=False, early=True)
    side = read.side_of_texts
    assert side is not None
    assert (side.name, side.model.task) == ("tiny-texts", "sentence-embedding")
    assert side.model.normalize
    assert read.validation(read.targets[0]).texts == side.validation(side.targets[0])


ROWS = {"source": "json", "files": ["captions.jsonl"]}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"texts": None}, "texts is missing"),
    "task": (
        {"model.task": "image-feature-extraction", "validate.metric": "cosine"},
        "texts is for task image-text-embedding",
    ),
    "length": ({"model.normalize": False}, "of unit length"),
    "search": ({"search": {}}, "search each by itself"),
    "metric": ({"texts.validate.metric": "accuracy"}, "texts.validate: metric accuracy does not"),
    "captions": ({"validate.data.columns": {"image": "image"}}, "needs a column for text_pair"),
    "vectors": (
        {"embeddings": {"type": "int8", "queries": ROWS, "documents": ROWS}},
        "embeddings.queries.columns",
    ),
    "positions": (
        {"texts.validate.latency.sequence": [128]},
        "texts.validate.latency.sequence.0: 128 tokens, but the model has 64 positions",
    ),
    "file": ({"texts.calibrate.data.files": ["absent.jsonl"]}, "texts.calibrate.*absent.jsonl"),
    "target": ({"texts.target": {"runtime": "none"}}, "texts.target"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_what_does_not_fit_is_refused_at_its_place(
    recipe: Path, case: tuple[dict[str, Any], str]
) -> None:
    changes, match = case
    overrides = [f"{place}={json.dumps(value)}" for place, value in changes.items()]
    with pytest.raises(OptimizeError) as refused:
        checks.read(recipe, overrides, fetch=False, early=True)
    messages = [str(one) for one in (refused.value, *refused.value.further)]
    assert any(re.search(match, message) for message in messages), messages
