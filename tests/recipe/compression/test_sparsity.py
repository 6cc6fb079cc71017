"""Valid combinations with pruning, and those refused before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from optimizer.checks import accepted
from optimizer.checks.context import Context
from optimizer.foundation.errors import RecipeError
from optimizer.recipe.compression.sparsity import SPARSITY_METHODS, Sparsity
from optimizer.recipe.file import read
from optimizer.recipe.schema import Recipe

ROOT = Path(__file__).parents[3]
INT4 = "{bits: 4, granularity: group, group_size: 64}"
RECIPE = """
name: sparse
model: {{source: somewhere, task: text-generation}}
{calibrate}
sparsity: {sparsity}
{quantize}
targets: [{{runtime: {runtime}}}]
validate:
  data: {{source: csv, files: [a.csv]}}
  metric: perplexity
  latency: {{must_beat_float: {speed}}}
"""
CALIBRATE = "calibrate: {data: {source: csv, files: [b.csv]}}"


def recipe(folder: Path, sparsity: str, quantize: str = "", **more: str) -> Recipe:
    words = {"calibrate": CALIBRATE, "runtime": "onnxruntime", "speed": "false", **more}
    file = folder / "sparse.yaml"
    file.write_text(RECIPE.format(sparsity=sparsity, quantize=quantize, **words))
    made = read(file, [])
    accepted.check(made, Context())
    return made


def test_without_a_quantize_section_weights_stay_float(tmp_path: Path) -> None:
    made = recipe(tmp_path, "{method: wanda}")
    assert made.quantize.leaves_float
    assert made.compression.sparsity == made.sparsity
    assert not recipe(tmp_path, "{method: wanda}", "quantize: {method: rtn}").quantize.leaves_float


REFUSED: list[tuple[str, str, dict[str, str], str]] = [
    ("{method: wonda}", "", {}, "accepted: magnitude, wanda, sparsegpt"),
    ("{method: wanda, pattern: 2:4}", "", {}, "write it in quotes"),
    ("{method: wanda, pattern: '4:2'}", "", {}, "0 < N < M"),
    ("{method: wanda, amount: 0.6}", "", {}, "amount belongs to pattern: unstructured"),
    ("{method: wanda, pattern: unstructured 0.6}", "", {}, "amount: 0.6"),
    ("{method: wanda, sparsegpt: {sweeps: 1}}", "", {}, "method is wanda"),
    ("{method: wanda}", "", {"calibrate": ""}, "calibrate is missing"),
    ("{method: sparsegpt}", "quantize: {method: rtn}", {}, r"use quantize.methods: \[gptq\]"),
    ("{method: wanda}", "quantize: {methods: [gptq, autoround]}", {}, "autoround: it may change"),
    ("{method: wanda}", "quantize: {method: pass_through}", {}, "pass_through"),
    (
        "{method: magnitude, pattern: '3:5'}",
        f"quantize: {{weights: {INT4}}}",
        {},
        "5 does not divide quantize.weights.group_size 64",
    ),
    (
        "{method: sparsegpt, sparsegpt: {damping: 0.1}}",
        "quantize: {methods: [gptq]}",
        {},
        "set quantize.gptq.damping",
    ),
    ("{method: wanda}", "quantize: {methods: [rtn], allocate: {}}", {}, "sensitivities"),
    (
        "{method: wanda}",
        "quantize: {keep_float_auto: {max_error: 0.1}}",
        {},
        "quantize.keep_float_auto: its sensitivities",
    ),
    ("null", "quantize: {method: float_weights}", {}, "would compress nothing"),
    ("{method: wanda}", "quantize: {method: float_weights, head: {bits: 8}}", {}, "in float"),
    ("{method: wanda}", "", {"speed": "true"}, "is not faster on target"),
    ("{method: wanda}", "", {"runtime": "compressed-tensors"}, "cannot store sparse float weights"),
]


@pytest.mark.parametrize(("sparsity", "quantize", "more", "message"), REFUSED)
def test_what_does_not_go_together_is_refused_with_why(
    tmp_path: Path, sparsity: str, quantize: str, more: dict[str, str], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe(tmp_path, sparsity, quantize, **more)


ACCEPTED: list[dict[str, Any]] = [
    {"sparsity": "{method: magnitude}", "calibrate": ""},
    {"sparsity": "{method: wanda}", "speed": "true", "runtime": "tensorrt-rtx"},
    {"sparsity": "{method: wanda}", "speed": "true", "quantize": "quantize: {method: rtn}"},
    {
        "sparsity": "{method: sparsegpt, sparsegpt: {sweeps: 0}}",
        "quantize": f"quantize: {{methods: [awq, gptq], weights: {INT4}}}",
        "runtime": "compressed-tensors",
    },
]


@pytest.mark.parametrize("given", ACCEPTED)
def test_what_goes_together_is_accepted(tmp_path: Path, given: dict[str, str]) -> None:
    assert recipe(tmp_path, **given).sparsity is not None


def test_a_target_is_told_of_sparse_kernels_where_the_recipe_says_so(tmp_path: Path) -> None:
    made = recipe(tmp_path, "{method: magnitude}", runtime="tensorrt-rtx").targets[0]
    assert made.options.changed() == []  # the build stage knows the weights


@pytest.mark.parametrize("name", SPARSITY_METHODS)
def test_a_method_s_code_is_in_the_file_of_its_name(name: str) -> None:
    assert SPARSITY_METHODS[name].apply == f"optimizer.compress.apply.pruning.{name}:prune"
    assert (ROOT / "optimizer" / "compress" / "methods" / "pruning" / f"{name}.py").is_file()
    assert Sparsity(method=name).record.name == name
