"""Sizes and requirements with which vLLM serves a folder, for the harness of the bundle.

Read from the sources in the wheel of vLLM 0.33.0 (get_min_capability of each scheme, and bfloat16
from 8.0 on), not run on a GPU. Below the compute capability of FP8 or NVFP4 products vLLM
de-quantizes the weights and does not round the inputs, which is another model than the proven one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from optimizer.compress.selection import matches
from optimizer.foundation.errors import RecipeError
from optimizer.foundation.qtensor import BLOCK
from optimizer.lower.compressed_tensors import config as folder_config
from optimizer.model.architectures.families import FAMILIES
from optimizer.recipe.schema import Quantize, Recipe
from optimizer.recipe.targets import VllmTarget

Shared = tuple[int, int, int]
"""(width of a layer; most parts of it, which further GPUs repeat; values that share a scale)"""
Grouping = tuple[str, int]
"""(granularity of a weight's scales; values along a row that share one)"""
TURING, AMPERE, ADA, BLACKWELL = "7.5", "8.0", "8.9", "10.0"


def check_model(config: Mapping[str, Any], at: str, recipe: Recipe, section: VllmTarget) -> None:
    """Raise RecipeError as config.check_model, and where the model has no equal parts for each GPU.

    config: content of config.json
    at: path of the target in the recipe
    """
    folder_config.check_model(config, at)
    scales = _shared_scales(config, lambda module: _grouping_in_recipe(recipe.quantize, module))
    _check_sizes(config, section, at, scales)


def _check_sizes(
    config: Mapping[str, Any], section: VllmTarget, at: str, scales: Sequence[Shared]
) -> None:
    """Check a folder that is lowered for vLLM: raise RecipeError where vLLM cannot divide heads or
    scales among the GPUs, or layers are fewer than the pipeline's stages."""
    heads, layers = (config.get(name) for name in ("num_attention_heads", "num_hidden_layers"))
    shares, stages = section.tensor_parallel_size, section.pipeline_parallel_size
    if isinstance(heads, int) and (why := _uneven(config, heads, shares, scales)):
        equal = [n for n in range(1, heads + 1) if not _uneven(config, heads, n, scales)]
        raise RecipeError(
            f"{shares} {why}",
            where=f"{at}.tensor_parallel_size",
            accepted=", ".join(map(str, equal)),
            fix="" if equal else "No size does: change quantize.weights, or quantize.layers.",
        )
    if isinstance(layers, int) and stages > layers:
        raise RecipeError(
            f"{stages} parts of {layers} layers",
            where=f"{at}.pipeline_parallel_size",
            accepted=f"1 to {layers}",
        )


def _uneven(config: Mapping[str, Any], heads: int, shares: int, scales: Sequence[Shared]) -> str:
    """Explain why vLLM cannot divide a layer into `shares` equal parts, or "" (QKVParallelLinear
    and `divide` of vLLM; its verify_group_size_divides_partition and validate_fp8_block_shape)."""
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


def _grouping_in_recipe(quantize: Quantize, module: str) -> Grouping | None:
    """Return for vLLM's check the grouping of a module's weight in a recipe; None where it stays
    float."""
    if matches(module, quantize.keep_float):
        return None
    rules = (rule.weights for rule in quantize.layers if matches(module, rule.modules))
    weights = next(rules, quantize.weights)
    return weights.granularity, weights.group_size or BLOCK


def _lowered_grouping(
    modules: Mapping[str, Mapping[str, str | None]], module: str
) -> Grouping | None:
    """Return for vLLM's check the grouping of a module's weight in lowering.json, as "int4 group
    64"; None where it is float."""
    if module not in modules:
        return None
    _, granularity, *size = str(modules[module]["weight"]).split()
    return granularity, int(size[0]) if granularity == "group" else BLOCK


def _shared_scales(
    config: Mapping[str, Any], grouping_of: Callable[[str], Grouping | None]
) -> list[Shared]:
    """List the dimensions of weights that tensor parallelism divides among GPUs and along which
    scales are grouped, so that a division may cut a group.

    grouping_of: function from a module's name to the grouping of its weight

    Returns, for each dimension, (its size, the most parts that it can be divided into, the size of
    a group or block).
    """
    row = FAMILIES.get(str(config.get("model_type")))
    heads, blocks = (config.get(name) for name in ("num_attention_heads", "num_hidden_layers"))
    if row is None or row.feed_forward is None or not (heads and blocks):
        return []
    neurons = config[row.feed_forward.width]
    groups = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or config["hidden_size"] // heads
    inputs = {row.output: (heads * head, heads), row.feed_forward.down: (neurons, heads)}
    outputs = {row.value: (groups * head, groups)}  # blocks are as high as wide
    outputs |= dict.fromkeys(row.feed_forward.up, (neurons, heads))
    shared: list[Shared] = []
    for block in range(blocks):
        for layer, (width, most) in (inputs | outputs).items():
            grouping = grouping_of(f"{row.base_prefix}{row.blocks}.{block}.{layer}")
            if grouping and grouping[0] in (("group", "block") if layer in inputs else ("block",)):
                shared.append((width, most, grouping[1]))
    return list(dict.fromkeys(shared))


def fit(section: VllmTarget) -> dict[str, Any]:
    """Return for the manifest the sizes, such as numbers of GPUs, with which the harness launches
    vLLM (harness/runtimes/vllm.py)."""
    return {
        "tensor_parallel_size": section.tensor_parallel_size,
        "pipeline_parallel_size": section.pipeline_parallel_size,
        "max_model_len": section.max_model_len,
    }


def build(section: VllmTarget, model: Path, _out: Path) -> dict[str, Any]:
    """Return the entries of engine.json for vLLM (lower/build.py). Nothing is built; `fit` also has
    the requirements that follow from the lowered folder `model`."""
    lowering = json.loads((model / "lowering.json").read_text(encoding="utf-8"))
    config = json.loads((model / "model" / "config.json").read_text(encoding="utf-8"))
    modules = lowering["modules"]
    scales = _shared_scales(config, lambda module: _lowered_grouping(modules, module))
    _check_sizes(config, section, "targets: vllm", scales)  # `check` opens no GGUF file
    least = AMPERE if section.float == "bf16" else TURING
    inputs = {str(module["activation"]).partition(" ")[0] for module in modules.values()}
    if lowering["float8_cache"] or "float8" in inputs:
        least = ADA
    if "float4" in inputs:
        least = BLACKWELL
    more = {
        "compute_capability": least,
        "kv_cache_dtype": "fp8" if lowering["float8_cache"] else "auto",
    }
    return {"fit": {**fit(section), **more}}
