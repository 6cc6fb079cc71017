"""Requirements of vLLM that follow from the lowered folder and the model's sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optimizer.foundation.errors import RecipeError
from optimizer.lower.compressed_tensors import vllm
from optimizer.recipe.targets import VllmTarget
from tests.validate.decoder_runs import decoder_recipe


@pytest.mark.parametrize(
    ("weight", "inputs", "cache", "float_type", "least"),
    [
        ("int4 group 64", None, False, "fp16", "7.5"),
        ("int4 group 64", None, False, "bf16", "8.0"),
        ("float4 group 16", None, False, "bf16", "8.0"),
        ("float4 group 16", "float4 group", False, "bf16", "10.0"),
        ("float8 channel", None, False, "bf16", "8.0"),
        ("float8 channel", "float8 token", False, "bf16", "8.9"),
        ("int4 group 64", None, True, "bf16", "8.9"),
    ],
)
def test_products_and_caches_in_fp8_need_compute_capability_8_9(
    weight: str, inputs: str | None, cache: bool, float_type: Any, least: str, tmp_path: Path
) -> None:
    modules = {"a": {"weight": weight, "activation": inputs}}
    document = {"modules": modules, "float8_cache": cache}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"num_attention_heads": 4}))
    (tmp_path / "lowering.json").write_text(json.dumps(document))
    section = VllmTarget(runtime="vllm", float=float_type, tensor_parallel_size=2)
    fit = vllm.build(section, tmp_path, tmp_path)["fit"]
    assert fit["compute_capability"] == least
    assert fit["kv_cache_dtype"] == ("fp8" if cache else "auto")
    assert (fit["tensor_parallel_size"], fit["pipeline_parallel_size"]) == (2, 1)


CONFIG = {
    "model_type": "llama",
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 64,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
}
GROUPS = {"weights": {"bits": 4, "granularity": "group", "group_size": 128}}
ONE_LAYER = {
    "weights": {**GROUPS["weights"], "group_size": 64},
    "layers": ({"modules": ("*.1.mlp",), **GROUPS},),
}
BLOCKS = {"weights": {"type": "float8", "granularity": "block"}}
GATES = {**BLOCKS, "keep_float": ("*_attn.?_proj", "*.down_proj")}
WIDE = {"weights": {**GROUPS["weights"], "group_size": 512}}


def check(folder: Path, quantize: dict[str, Any], **sizes: int) -> None:
    recipe = decoder_recipe("a", folder, quantize)
    target = VllmTarget(runtime="vllm", **sizes)
    vllm.check_model(CONFIG, "targets.0", recipe, target)


@pytest.mark.parametrize(
    ("quantize", "sizes", "message"),
    [
        ({}, {"tensor_parallel_size": 8}, "8 does not divide the model's 12 attention heads"),
        ({}, {"tensor_parallel_size": 4}, r"neither .* 6 key/value heads[\s\S]*1, 2, 3, 6, 12"),
        ({}, {"pipeline_parallel_size": 3}, "pipeline_parallel_size.*3 parts of 2 layers"),
        (BLOCKS, {"tensor_parallel_size": 6}, r"6 gives 64 of 384 values[\s\S]*: 1, 3$"),
        (GATES, {"tensor_parallel_size": 12}, r"12 gives 64 of 768 values[\s\S]*: 1, 2, 3, 6$"),
        (WIDE, {}, r"1 gives 768 of 768 values[\s\S]*512 share a scale. No size does"),
        (GROUPS, {"tensor_parallel_size": 12}, r"12 gives 64 of 768 values[\s\S]*: 1, 2, 3, 6$"),
        (ONE_LAYER, {"tensor_parallel_size": 12}, r"12 gives 64 of 768 values[\s\S]*: 1, 2, 3, 6$"),
    ],
)
def test_sizes_that_vllm_refuses_to_load_are_refused(
    quantize: dict[str, Any], sizes: dict[str, int], message: str, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=message):
        check(tmp_path, quantize, **sizes)


def test_sizes_that_divide_the_model_are_taken(tmp_path: Path) -> None:
    for size in (3, 6, 12):
        check(tmp_path, {}, tensor_parallel_size=size)
    check(tmp_path, BLOCKS, tensor_parallel_size=3)
    for around in (("*.o_proj", "*.down_proj"), ("model.layers.?",)):
        check(tmp_path, {**GROUPS, "keep_float": around}, tensor_parallel_size=12)


def test_a_lowered_model_is_compared_with_its_own_groups(tmp_path: Path) -> None:
    """A GGUF file is not opened by `check`, and sensitivities choose groups only in compress."""
    down = {"weight": "int4 group 128", "activation": None}
    document = {"modules": {"model.layers.1.mlp.down_proj": down}, "float8_cache": False}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "lowering.json").write_text(json.dumps(document))
    vllm.build(VllmTarget(runtime="vllm", tensor_parallel_size=6), tmp_path, tmp_path)
    with pytest.raises(RecipeError, match="12 gives 64 of 768 values"):
        vllm.build(VllmTarget(runtime="vllm", tensor_parallel_size=12), tmp_path, tmp_path)
