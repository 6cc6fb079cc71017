"""Sizes and requirements with which vLLM serves a folder, for the harness of the bundle.

Read from the sources in the wheel of vLLM 0.33.0 (get_min_capability of each scheme, and bfloat16
from 8.0 on), not run on a GPU. Below the compute capability of FP8 products vLLM de-quantizes the
weights and does not round the inputs, which is another model than the proven one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import RecipeError
from optimizer.foundation.qtensor import BLOCK
from optimizer.model.architectures.families import FAMILIES
from optimizer.recipe.schema import Quantize, Recipe
from optimizer.recipe.targets import VllmTarget

Shared = tuple[int, int, int]
"""(width of a layer; most parts of it, which further GPUs repeat; values that share a scale)"""
TURING, AMPERE, ADA = "7.5", "8.0", "8.9"


def check_parts(config: Mapping[str, Any], recipe: Recipe, section: VllmTarget, at: str) -> None:
    """Raise RecipeError where the model has no equal parts for each GPU.

    config: content of config.json
    at: path of the target in the recipe
    """
    _check_sizes(config, section, at, _shared_scales(config, recipe.quantize))


def _check_sizes(
    config: Mapping[str, Any], section: VllmTarget, at: str, scales: Sequence[Shared]
) -> None:
    heads, layers = (config.get(name) for name in ("num_attention_heads", "num_hidden_layers"))
    shares, stages = section.tensor_parallel_size, section.pipeline_parallel_size
    if isinstance(heads, int) and (why := _uneven(config, heads, shares, scales)):
        equal = [n for n in range(1, heads + 1) if not _uneven(config, heads, n, scales)]
        raise RecipeError(
            f"{shares} {why}",
            where=f"{at}.tensor_parallel_size",
            accepted=", ".join(map(str, equal)),
        )
    if isinstance(layers, int) and stages > layers:
        raise RecipeError(
            f"{stages} parts of {layers} layers",
            where=f"{at}.pipeline_parallel_size",
            accepted=f"1 to {layers}",
        )


def _uneven(config: Mapping[str, Any], heads: int, shares: int, scales: Sequence[Shared]) -> str:
    """Reason why a layer has no `shares` equal parts, or "" (QKVParallelLinear and `divide` of
    vLLM; its verify_group_size_divides_partition and validate_fp8_block_shape)."""
    groups = config.get("num_key_value_heads") or heads
    neurons = config.get(_width(config)) or shares
    if heads % shares:
        return f"does not divide the model's {heads} attention heads"
    if groups % shares and shares % groups:
        return f"is neither a divisor nor a multiple of the model's {groups} key/value heads"
    if neurons % shares:
        return f"does not divide the model's {neurons} neurons ({_width(config)})"
    for width, most, size in scales:
        if (part := width // min(shares, most)) % size:
            return f"gives {part} of {width} values to a GPU, and {size} share a scale"
    return ""


def _width(config: Mapping[str, Any]) -> str:
    row = FAMILIES.get(str(config.get("model_type")))
    return row.feed_forward.width if row and row.feed_forward else "intermediate_size"


def _shared_scales(config: Mapping[str, Any], quantize: Quantize) -> list[Shared]:
    """Widths that tensor parallelism divides and along which quantize.weights has scales."""
    weights, row = quantize.weights, FAMILIES.get(str(config.get("model_type")))
    size = BLOCK if weights.granularity == "block" else weights.group_size
    if size is None or row is None or row.feed_forward is None:
        return []
    heads, neurons = config["num_attention_heads"], config[row.feed_forward.width]
    groups = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or config["hidden_size"] // heads
    divided = {row.output: (heads * head, heads), row.feed_forward.down: (neurons, heads)}
    if weights.granularity == "block":  # along rows too
        divided[row.value] = groups * head, groups
    others = [*quantize.keep_float, *(p for rule in quantize.layers for p in rule.modules)]
    blocks = [f"{row.base_prefix}{row.blocks}.{i}" for i in range(config["num_hidden_layers"])]
    return [
        (width, most, size)
        for layer, (width, most) in divided.items()
        if not all(any(fnmatchcase(f"{b}.{layer}", p) for p in others) for b in blocks)
    ]


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
    config = json.loads((model / "model" / "config.json").read_text(encoding="utf-8"))
    _check_sizes(
        config, section, "targets: vllm", ()
    )  # of a GGUF file, which `check` does not open
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
