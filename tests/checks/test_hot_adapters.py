"""A recipe whose adapters stay apart is refused where they could not be chosen or proven."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from optimizer.checks import hot_adapters
from optimizer.checks.context import Context
from optimizer.foundation.errors import OptimizeError
from optimizer.recipe.model import HotAdapters
from optimizer.recipe.schema import Recipe
from tests.validate.decoder_runs import INT4, decoder_recipe

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="pip install peft")

ROWS = {"source": "json", "files": ("rows.jsonl",), "columns": {"text": "text"}}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "target": ({"targets": ({"runtime": "openvino"},)}, r"openvino on cpu.*onnxruntime on cpu"),
    "awq": ({"quantize": {"method": "awq", "weights": INT4}}, "method awq changes the inputs"),
    "norms": ({"quantize": {"method": "autoround", "weights": INT4}}, "method autoround"),
    "static": ({"quantize": {"activations": {"range": "minmax"}}}, "static ranges"),
    "name": ({"name": "sql"}, "name of the model itself"),
    "search": ({"search": {}}, "search makes another"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_it_says_what_adapters_do_not_go_with(
    case: tuple[dict[str, Any], str], tmp_path: Path
) -> None:
    change, match = case
    document = decoder_recipe("none", tmp_path, {"weights": INT4}).model_dump(
        by_alias=True, exclude_unset=True
    )
    document["model"]["adapters"] = {"keep": "hot", "sources": {"sql": {"source": "./sql"}}}
    hot_adapters.check(Recipe.model_validate(document), Context())
    with pytest.raises(OptimizeError, match=match):
        hot_adapters.check(Recipe.model_validate(document | change), Context())


def test_only_a_task_that_generates_text_has_them() -> None:
    from optimizer.recipe.schema import Model

    model = {"source": "none", "task": "feature-extraction"}
    section = Model.model_validate(
        {**model, "adapters": {"keep": "hot", "sources": {"sql": {"source": "./sql"}}}}
    )
    recipe = Recipe.model_construct(model=section)
    with pytest.raises(OptimizeError, match="for tasks that generate text"):
        hot_adapters._task(recipe)


def test_a_name_that_is_another_adapters_file_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a\.safetensors ends as a file does"):
        HotAdapters.model_validate(
            {"keep": "hot", "sources": {"a.safetensors": {"source": "./sql"}}}
        )
