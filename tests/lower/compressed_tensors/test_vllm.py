"""Requirements of vLLM that follow from the lowered folder and the model's sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optimizer.foundation.errors import RecipeError
from optimizer.lower.compressed_tensors import vllm
from optimizer.recipe.targets import VllmTarget


@pytest.mark.parametrize(
    ("weight", "inputs", "cache", "float_type", "least"),
    [
        ("int4 group 64", None, False, "fp16", "7.5"),
        ("int4 group 64", None, False, "bf16", "8.0"),
        ("float4 group 16", None, False, "bf16", "8.0"),
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
    (tmp_path / "lowering.json").write_text(json.dumps(document))
    section = VllmTarget(runtime="vllm", float=float_type, tensor_parallel_size=2)
    fit = vllm.build(section, tmp_path, tmp_path)["fit"]
    assert fit["compute_capability"] == least
    assert fit["kv_cache_dtype"] == ("fp8" if cache else "auto")
    assert (fit["tensor_parallel_size"], fit["pipeline_parallel_size"]) == (2, 1)


def test_sizes_that_do_not_divide_the_model_are_refused() -> None:
    config = {"num_attention_heads": 6, "num_hidden_layers": 2}
    for sizes, place in (
        ({"tensor_parallel_size": 4}, "tensor_parallel_size.*4 does not divide the model's 6"),
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size.*3 parts of 2 layers"),
    ):
        with pytest.raises(RecipeError, match=place):
            vllm.check_parts(config, VllmTarget(runtime="vllm", **sizes), "targets.0")
    vllm.check_parts(config, VllmTarget(runtime="vllm", tensor_parallel_size=3), "targets.0")
