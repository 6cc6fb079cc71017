"""Methods that do not go together are refused, and one of them chooses the integers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from optimizer.recipe.compression import composition
from optimizer.recipe.compression.quantize import Quantize
from optimizer.recipe.data import DataSpec
from optimizer.recipe.recover import LossWeights, Recover
from optimizer.recipe.schema import Recipe

W8A8 = {"activations": {}}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"methods": ("gptq", "awq")},
            "in this order: rotation, equalization, smoothquant, awq, rtn, gptq",
        ),
        ({"methods": ("gptq", "gptq")}, "each once"),
        ({"methods": ("rtn", "gptq")}, "rtn chooses the integers alone; leave it out beside gptq"),
        ({"methods": ("rtn", "autoround")}, "leave it out beside autoround"),
        ({"methods": ("rotation", "awq", "autoround")}, "leave one of rotation and awq out"),
        ({"methods": ("equalization", "awq", "rtn")}, "leave equalization or awq out"),
        ({"methods": ("autoround", "scale_tuning")}, "both train the norm weights"),
        ({"method": "smoothquant"}, "needs an activations block"),
        ({"method": "scale_tuning", **W8A8}, "trains on float inputs"),
        ({"method": "rtn", "methods": ("gptq",)}, "both given"),
        ({"methods": ("gptq", "pass_through")}, "nothing else"),
        ({"method": "gptq", "allocate": {}}, "with gptq uniform weights are better"),
        ({"allocate": {}, **W8A8}, "errors of weights only"),
        ({"method": "rtn", "gptq": {"damping": 0.1}}, "methods does not name gptq"),
    ],
)
def test_methods_that_do_not_go_together_are_refused(section: dict[str, Any], message: str) -> None:
    quantize = Quantize.model_validate(section)
    with pytest.raises(ValueError, match=message):
        composition.check(quantize)


@pytest.mark.parametrize(
    ("section", "rounding"),
    [
        ({}, "weights.rtn:round_weight"),
        ({"method": "awq"}, "activations.awq:round_weight"),
        ({"methods": ("awq", "gptq")}, "weights.gptq:round_weight"),
        ({"method": "awq", "awq": {"clip": False}}, "weights.rtn:round_weight"),
        ({"methods": ("awq", "scale_tuning")}, "activations.awq:round_weight"),
    ],
)
def test_awq_searches_ranges_where_nothing_else_chooses_integers(
    section: dict[str, Any], rounding: str
) -> None:
    record = Quantize.model_validate(section).block_rounding
    assert record.apply == f"optimizer.compress.apply.{rounding}"


@pytest.mark.parametrize(
    ("quantize", "words"),
    [
        ({"method": "rotation"}, "qat with rotation"),
        ({"activations": {"attention": "int8"}}, "qat with quantize.activations.attention"),
        ({"head": {"bits": 8}}, "quantize.head"),
        ({"keep_float_auto": {"max_error": 0.1}}, "name modules in keep_float"),
    ],
)
def test_qat_is_refused_where_it_cannot_train(quantize: dict[str, Any], words: str) -> None:
    section = Quantize.model_validate_json(json.dumps(quantize))
    with pytest.raises(ValueError, match=words):
        composition.check_training(section)


@pytest.mark.parametrize(
    ("task", "columns", "words"),
    [
        ("token-classification", {"text": "t", "tags": "g"}, "only text-classification"),
        ("sentence-embedding", {"text": "t", "label": "l"}, "only text-classification"),
        ("text-classification", {"text": "t"}, "has no label"),
    ],
)
def test_labels_are_learned_only_where_there_are_some(
    task: str, columns: dict[str, str], words: str
) -> None:
    data = DataSpec(source="json", files=("a.jsonl",), columns=columns)
    learning = Recover(losses=LossWeights(labels=1))
    with pytest.raises(ValueError, match=words):
        composition.check_labels(learning, data, task)
    composition.check_labels(Recover(), data, task)


def test_conversations_are_for_tasks_that_generate() -> None:
    specs = {"calibrate": DataSpec(source="json", columns={"messages": "chat"})}
    composition.check_inputs("text-generation", specs)
    with pytest.raises(ValueError, match=r"calibrate.columns has messages, .* takes texts; give"):
        composition.check_inputs("text-classification", specs)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, r"takes images; calibrate.columns has text"),
        ({"image": "image"}, ""),
        ({"image": "image", "max_length": 64}, "model.max_length is for tasks that take texts"),
        ({"image": "image", "qat": {}}, "qat is for tasks that take texts"),
    ],
)
def test_images_are_asked_of_image_tasks_and_texts_of_the_others(
    changes: dict[str, Any], why: str
) -> None:
    of = {"source": "json", "files": ("x.jsonl",), "columns": {"text": "text"}}
    if "image" in changes:
        of["columns"] = {"image": changes["image"]}
    model = {"source": "x", "task": "image-classification"}
    model |= {k: v for k, v in changes.items() if k == "max_length"}
    document = {
        "name": "x",
        "model": model,
        "calibrate": {"data": of},
        "targets": ({"runtime": "onnxruntime"},),
        "validate": {"data": of, "metric": "cosine"},
        **{k: v for k, v in changes.items() if k == "qat"},
    }
    if not why:
        assert Recipe.model_validate(document).model.task == "image-classification"
        return
    with pytest.raises(ValueError, match=why):
        Recipe.model_validate(document)
