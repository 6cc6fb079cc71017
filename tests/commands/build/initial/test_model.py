"""init proposes what the files of a model need: an adapter's model, and a head to leave out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optimizer.commands.build.initial.model import look
from optimizer.commands.build.initial.rows import describe_absent
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
    text = starter_recipe(facts, describe_absent(facts), tmp_path)
    assert f"source: {tiny_llama} " in text
    assert f"adapters: [{alone}]" in text


def test_an_adapter_that_names_no_model_is_refused(tmp_path: Path) -> None:
    alone = write(tmp_path / "mine", None)
    with pytest.raises(RecipeError, match="does not name the model") as error:
        look(str(alone), None)
    assert f"adapters: [{alone}]" in str(error.value)


def test_a_head_that_the_asked_task_leaves_out_is_named(tiny_classifier: Path) -> None:
    facts = look(str(tiny_classifier), "feature-extraction")
    assert facts.settings[0].startswith('ignore_tensors: ["classifier.*"]')
    assert look(str(tiny_classifier), None).settings == ()


def test_an_adapter_of_an_adapter_is_refused(tmp_path: Path) -> None:
    alone = write(tmp_path / "mine", str(tmp_path / "mine"))
    with pytest.raises(RecipeError, match="is an adapter too"):
        look(str(alone), None)
