"""Sizes and requirements with which vLLM serves a folder, for the harness of the bundle.

Read from the sources in the wheel of vLLM 0.33.0 (get_min_capability of each scheme, and bfloat16
from 8.0 on), not run on a GPU. Below the compute capability of FP8 products vLLM de-quantizes the
weights and does not round the inputs, which is another model than the proven one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import RecipeError
from optimizer.recipe.targets import VllmTarget

TURING, AMPERE, ADA = "7.5", "8.0", "8.9"


def check_parts(config: Mapping[str, Any], section: VllmTarget, at: str) -> None:
    """Raise RecipeError where the model has no equal parts for each GPU.

    config: content of config.json
    """
    heads, layers = (config.get(name) for name in ("num_attention_heads", "num_hidden_layers"))
    shares, stages = section.tensor_parallel_size, section.pipeline_parallel_size
    if isinstance(heads, int) and heads % shares:
        raise RecipeError(
            f"{shares} does not divide the model's {heads} attention heads",
            where=f"{at}.tensor_parallel_size",
            accepted=f"divisors of {heads}",
        )
    if isinstance(layers, int) and stages > layers:
        raise RecipeError(
            f"{stages} parts of {layers} layers",
            where=f"{at}.pipeline_parallel_size",
            accepted=f"1 to {layers}",
        )


def fit(section: VllmTarget) -> dict[str, Any]:
    """Sizes of the launch; see harness/runtimes/vllm.py."""
    return {
        "tensor_parallel_size": section.tensor_parallel_size,
        "pipeline_parallel_size": section.pipeline_parallel_size,
        "max_model_len": section.max_model_len,
    }


def build(section: VllmTarget, model: Path, _out: Path) -> dict[str, Any]:
    """See lower/build.py: nothing is built; `fit` gains what follows from the lowered folder."""
    lowering = json.loads((model / "lowering.json").read_text(encoding="utf-8"))
    least = AMPERE if section.float == "bf16" else TURING
    if lowering["float8_cache"] or any(map(_multiplies_float8, lowering["modules"].values())):
        least = ADA
    more = {
        "compute_capability": least,
        "kv_cache_dtype": "fp8" if lowering["float8_cache"] else "auto",
    }
    return {"fit": {**fit(section), **more}}


def _multiplies_float8(module: Mapping[str, str | None]) -> bool:
    return str(module["activation"]).startswith("float8")
