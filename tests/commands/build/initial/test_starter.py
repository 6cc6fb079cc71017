"""`optimize init` writes recipes that hold as they are, but for their data."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from optimizer.commands.build.initial import model as models
from optimizer.commands.build.initial import rows, starter
from optimizer.compress.selection import select
from optimizer.compress.walk.model_source import ModelSource
from optimizer.foundation.errors import RecipeError
from optimizer.harness import tasks
from optimizer.harness.runtimes.machine import Machine
from optimizer.model.architectures.families import FAMILIES
from optimizer.model.checkpoint.model import build_skeleton_from_config
from optimizer.recipe import file as recipe_file
from tests.vision import config, write


def starter_recipe(model: str, task: str | None, gguf_file: str | None = None) -> str:
    starter.check_names(model, task, gguf_file)
    facts = models.look(model, task, gguf_file)
    return starter.starter_recipe(facts, rows.describe_absent(facts), Path())


@pytest.mark.parametrize("task", tasks.list_names())
def test_the_recipe_of_every_task_is_valid(task: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(starter_recipe("owner/Some_Model", task))
    made = recipe_file.read(file)
    assert (made.model.task, made.model.source) == (task, "owner/Some_Model")
    needed = tasks.find_task(made.model.task).metrics[made.validate_.metric]
    assert not needed or set(needed[0]) <= set(made.validate_.data.columns)


@pytest.mark.parametrize(
    ("checkpoint", "task"),
    [
        ("tiny_bert", "feature-extraction"),
        ("tiny_classifier", "text-classification"),
        ("tiny_llama", "text-generation"),
    ],
)
def test_the_task_is_read_from_the_architecture(
    checkpoint: str, task: str, request: pytest.FixtureRequest
) -> None:
    assert f"  task: {task}\n" in starter_recipe(str(request.getfixturevalue(checkpoint)), None)


@pytest.mark.parametrize(
    ("head", "task"),
    [("ForImageClassification", "image-classification"), ("Model", "image-feature-extraction")],
)
def test_the_task_of_a_model_of_images_is_read_too(head: str, task: str, tmp_path: Path) -> None:
    config = {"model_type": "vit", "architectures": [f"ViT{head}"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert f"  task: {task}\n" in starter_recipe(str(tmp_path), None)


@pytest.mark.parametrize(("kind", "method"), [("vit", "smoothquant"), ("resnet", "rtn")])
@pytest.mark.parametrize("task", [None, "image-feature-extraction"])
def test_the_recipe_of_images_is_one_that_compress_takes(
    kind: str, method: str, task: str | None, tmp_path: Path
) -> None:
    file, folder = tmp_path / "recipe.yaml", write(tmp_path / kind, kind)
    file.write_text(starter_recipe(str(folder), task))
    made = recipe_file.read(file)
    assert made.quantize is not None
    assert made.quantize.chosen[0].name == method
    architecture = FAMILIES[kind]
    model = build_skeleton_from_config(config(kind), made.model.task)
    source = ModelSource(model, {}, architecture, architecture.prefix(made.model.task))
    assert select(source, made.quantize).quantized


def test_a_model_of_images_that_is_not_here_gets_the_method_that_takes_every_model(
    tmp_path: Path,
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(starter_recipe("microsoft/resnet-18", "image-classification"))
    assert recipe_file.read(file).quantize.chosen[0].name == "rtn"


def test_a_gguf_file_is_a_language_model(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(starter_recipe("python-package:some", None, "model.Q4_1.gguf"))
    made = recipe_file.read(file).model
    assert (made.gguf_file, made.task) == ("model.Q4_1.gguf", "text-generation")


def test_a_task_that_is_none_is_refused_with_those_that_are() -> None:
    with pytest.raises(RecipeError, match="text-generation"):
        starter_recipe("owner/model", "text-generatoin")


@pytest.mark.parametrize(
    ("task", "features", "gated"),
    [
        ("feature-extraction", ("avx2",), False),
        ("feature-extraction", ("avx2", "avx_vnni"), True),
        ("feature-extraction", (), True),
        ("text-generation", ("avx2",), True),
    ],
)
def test_the_gate_of_speed_is_off_and_marked_where_integers_are_not_faster(
    task: str, features: tuple[str, ...], gated: bool
) -> None:
    machine = Machine("linux", "x86_64", cpu="Old", cpu_features=features)
    facts = models.look("owner/model", task)
    slow = starter.warn_slow_integers(machine, facts.task)
    text = starter.starter_recipe(facts, rows.describe_absent(facts), Path(), slow=slow)
    assert f"    must_beat_float: {str(gated).lower()}" in text
    assert ("# DECIDE: this processor (Old)" in text) is not gated
