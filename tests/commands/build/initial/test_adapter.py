"""init of a folder with an adapter alone proposes its model, and the adapter merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optimizer.commands.build.initial.model import look
from optimizer.commands.build.initial.rows import absent
from optimizer.commands.build.initial.starter import starter_recipe
from optimizer.foundation.errors import RecipeError


def write(folder: Path, base: str | None) -> Path:
    folder.mkdir()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_the_recipe_names_the_model_and_the_adapter(tiny_llama: Path, tmp_path: Path) -> None:
    alone = write(tmp_path / "mine", str(tiny_llama))
    facts = look(str(alone), None)
    assert (facts.name, facts.task.name) == (str(tiny_llama), "text-generation")
    text = starter_recipe(facts, absent(facts), tmp_path)
    assert f"source: {tiny_llama} " in text
    assert f"adapters: [{alone}]" in text


def test_an_adapter_that_names_no_model_is_refused(tmp_path: Path) -> None:
    alone = write(tmp_path / "mine", None)
    with pytest.raises(RecipeError, match="does not name the model") as error:
        look(str(alone), None)
    assert f"adapters: [{alone}]" in str(error.value)
