"""Options that a TensorRT product lacks are refused before anything is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from optimizer import targets
from optimizer.checks import accepted
from optimizer.checks.context import Context
from optimizer.foundation.errors import MachineError, RecipeError
from optimizer.harness.runtimes.machine import describe_machine
from optimizer.harness.runtimes.trt.products import PRODUCTS, BuildOptions
from optimizer.recipe import file as recipe_file
from optimizer.recipe.schema import OnnxRuntimeTarget
from optimizer.targets import missing_packages

RECIPE = """
name: probe
model: {{source: somewhere, task: sentence-embedding}}
calibrate: {{data: {{source: text, files: [a.txt]}}, sequence_length: 64}}
quantize:
  weights: {{bits: 8, granularity: channel}}
  activations: {{range: minmax}}
targets:
  - {target}
validate: {{data: {{source: text, files: [b.txt]}}, metric: cosine}}
"""
ASKED: dict[str, Any] = {
    "workspace_gb": "2",
    "sparse_weights": "true",
    "hardware_compatible": "ampere_plus",
    "version_compatible": "true",
    "refittable": "true",
    "strip_weights": "true",
    "compute_capabilities": "['89']",
}


def target(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(target=text))
    recipe = recipe_file.read(path)
    accepted.check(recipe, Context())
    return recipe.targets[0]


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("option", ASKED)
def test_an_option_is_taken_or_refused_with_what_takes_it(
    product: str, option: str, tmp_path: Path
) -> None:
    text = f"{{runtime: {product}, {option}: {ASKED[option]}}}"
    if option in PRODUCTS[product].options:
        assert target(tmp_path, text).options.changed() == [option]
        return
    with pytest.raises(RecipeError, match=rf"targets\.0\.{option}") as caught:
        target(tmp_path, text)
    (other,) = set(PRODUCTS) - {product}
    assert f"use a target that supports it: {other}." in str(caught.value)


def test_every_option_is_some_products() -> None:
    assert frozenset().union(*(p.options for p in PRODUCTS.values())) == frozenset(ASKED)
    assert BuildOptions().changed() == []


def test_a_profile_that_excludes_the_calibrated_length_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no profile accepts 64 tokens.*8 to 32"):
        target(tmp_path, "{runtime: tensorrt-rtx, shapes: {sequence: [8, 16, 32]}}")


def test_a_bucket_that_holds_the_calibrated_length_suffices(tmp_path: Path) -> None:
    buckets = "[{sequence: [16, 16, 32]}, {sequence: [33, 64, 256], batch: [1, 1, 1]}]"
    made = target(tmp_path, f"{{runtime: tensorrt-rtx, shapes: {{buckets: {buckets}}}}}")
    small, large = made.shapes.profiles()
    assert (small.sequence, small.batch) == ((16, 16, 32), (1, 8, 32))
    assert (large.sequence, large.batch) == ((33, 64, 256), (1, 1, 1))
    gap = "[{sequence: [16, 16, 32]}, {sequence: [128, 128, 256]}]"
    with pytest.raises(RecipeError, match="16 to 32 or 128 to 256"):
        target(tmp_path, f"{{runtime: tensorrt-rtx, shapes: {{buckets: {gap}}}}}")


def test_a_bucket_outside_its_shapes_is_refused(tmp_path: Path) -> None:
    text = "{runtime: tensorrt-rtx, shapes: {buckets: [{sequence: [8, 64, 512]}]}}"
    with pytest.raises(RecipeError, match=r"buckets\.0\.sequence.*is not inside"):
        target(tmp_path, text)


def test_a_key_that_no_product_has_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"did you mean.*workspace_gb|workspace_gb"):
        target(tmp_path, "{runtime: tensorrt, workspce_gb: 2}")


def generating(tmp_path: Path, runtime: str, embedding: str) -> None:
    """Check a decoder's recipe with this quantize.embedding."""
    text = RECIPE.format(target=f"{{runtime: {runtime}}}")
    for old, new in (
        ("sentence-embedding", "text-generation"),
        ("cosine", "perplexity"),
        ("  activations: {range: minmax}", f"  embedding: {embedding}"),
    ):
        text = text.replace(old, new)
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    accepted.check(recipe_file.read(path), Context())


def test_an_embedding_in_eight_bits_is_taken_where_codes_are_looked_up(tmp_path: Path) -> None:
    generating(tmp_path, "onnxruntime", "{bits: 8, granularity: group, group_size: 64}")
    with pytest.raises(
        RecipeError, match=r"quantize\.embedding: .* target tensorrt-rtx .* int8 table"
    ):
        generating(tmp_path, "tensorrt-rtx", "{bits: 8}")


def test_an_embedding_in_fewer_bits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"quantize\.embedding\.bits: 4 is not accepted"):
        generating(tmp_path, "onnxruntime", "{bits: 4, granularity: group, group_size: 64}")


def test_coded_activations_on_onnxruntime_cuda_are_refused_with_what_to_do(tmp_path: Path) -> None:
    assert target(tmp_path, "{runtime: onnxruntime}").device == "cpu"
    with pytest.raises(
        RecipeError, match=r"quantize\.activations: .*Use target tensorrt"
    ) as caught:
        target(tmp_path, "{runtime: onnxruntime, device: cuda}")
    assert "compressed-tensors" not in str(caught.value)  # it is judged on a CPU only


@pytest.mark.parametrize("old", ["formats: [compressed-tensors]", "float: bf16"])
def test_the_old_words_for_a_compressed_tensors_folder_name_the_target(
    old: str, tmp_path: Path
) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(target="{runtime: onnxruntime}") + f"package: {{{old}}}\n")
    with pytest.raises(RecipeError, match=r"package\.\w+: .*runtime: compressed-tensors"):
        recipe_file.read(path)


def test_a_compressed_tensors_target_needs_no_graph_and_no_gpu(tmp_path: Path) -> None:
    made = target(tmp_path, "{runtime: compressed-tensors, float: fp16}")
    assert (made.name, made.export, made.float_type) == ("compressed-tensors", None, "fp16")
    assert not made.depends_on_gpu
    assert made.profiles == ()


def in_groups(
    tmp_path: Path, text: str, activations: str = "{range: minmax}", bits: int = 4
) -> None:
    """Check a recipe with weights in groups beside quantized activations."""
    groups = f"{{{{bits: {bits}, granularity: group, group_size: 64}}}}"
    recipe = RECIPE.replace("{{bits: 8, granularity: channel}}", groups)
    recipe = recipe.replace("{{range: minmax}}", f"{{{activations}}}")
    path = tmp_path / "recipe.yaml"
    path.write_text(recipe.format(target=text))
    accepted.check(recipe_file.read(path), Context())


def test_groups_beside_ranges_are_taken_where_the_recipe_accepts_products_in_float(
    tmp_path: Path,
) -> None:
    in_groups(tmp_path, "{runtime: onnxruntime, allow_precision_fallback: true}")
    with pytest.raises(
        RecipeError, match=r"no integer kernel.*targets\.0\.allow_precision_fallback: true"
    ):
        in_groups(tmp_path, "{runtime: onnxruntime}")


@pytest.mark.parametrize(
    ("runtime", "activations", "bits"),
    [
        ("onnxruntime", "{granularity: token}", 4),
        ("onnxruntime", "{range: minmax}", 8),
        ("tensorrt-rtx", "{range: minmax}", 4),
        ("compressed-tensors", "{range: minmax}", 4),
    ],
)
def test_groups_beside_activations_that_nothing_runs_are_refused_whatever_is_accepted(
    tmp_path: Path, runtime: str, activations: str, bits: int
) -> None:
    accepts = f"{{runtime: {runtime}, allow_precision_fallback: true}}"
    with pytest.raises(RecipeError, match="no integer kernel") as caught:
        in_groups(tmp_path, accepts, activations, bits)
    assert "allow_precision_fallback" not in str(caught.value)


def test_attention_in_integers_is_taken_by_openvino_alone(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    recipe = RECIPE.replace("{{range: minmax}}", "{{attention: int8}}")
    path.write_text(recipe.format(target="{runtime: openvino}"))
    accepted.check(recipe_file.read(path), Context())
    for runtime in ("onnxruntime", "tensorrt-rtx", "onnxruntime-web"):
        path.write_text(recipe.format(target=f"{{runtime: {runtime}}}"))
        with pytest.raises(RecipeError, match=r"attention: int8 .*openvino alone"):
            accepted.check(recipe_file.read(path), Context())


def test_openvino_refuses_what_it_would_not_keep_in_integers(tmp_path: Path) -> None:
    made = target(tmp_path, "{runtime: openvino, float: bf16}")
    assert (made.name, made.float_type, made.computes_in) == ("openvino-cpu", "fp32", "bf16")
    generating(tmp_path, "openvino", "{bits: 8, granularity: group, group_size: 64}")
    with pytest.raises(RecipeError, match=r"targets\.0\.genai: true for sentence-embedding"):
        target(tmp_path, "{runtime: openvino, genai: true}")
    with pytest.raises(RecipeError, match=r"targets\.0\.kv_cache: int8 for sentence-embedding"):
        target(tmp_path, "{runtime: openvino, kv_cache: int8}")
    with pytest.raises(RecipeError, match=r"dynamic_quantization: 32 needs float: fp32"):
        target(tmp_path, "{runtime: openvino, float: bf16, dynamic_quantization: 32}")
    with pytest.raises(RecipeError, match=r"kv_cache: int8 needs device: cpu, not gpu"):
        target(tmp_path, "{runtime: openvino, device: gpu, kv_cache: int8}")
    assert target(tmp_path, "{runtime: openvino, device: npu}").name == "openvino-npu"
    for section in ("{granularity: token}", "{range: minmax}"):
        with pytest.raises(RecipeError, match=r"token is not accepted|no integer kernel"):
            in_groups(tmp_path, "{runtime: openvino}", section)


@pytest.mark.parametrize("runtime", [n for n, t in targets.TARGETS.items() if n != "gguf"])
def test_only_gguf_takes_scales_of_either_sign(runtime: str, tmp_path: Path) -> None:
    weights = "{bits: 4, granularity: group, group_size: 32, full_range: true}"
    text = RECIPE.replace("{{bits: 8, granularity: channel}}", "{weights}")
    text = "".join(line for line in text.splitlines(True) if "activations" not in line)
    path = tmp_path / "recipe.yaml"
    path.write_text(text.format(target=f"{{runtime: {runtime}}}", weights=weights))
    with pytest.raises(RecipeError, match=r"quantize\.weights\.full_range.*\n?.*gguf"):
        accepted.check(recipe_file.read(path), Context())


def test_a_gpu_target_that_cannot_be_opened_here_is_refused_before_any_work(tmp_path: Path) -> None:
    if describe_machine().gpu is not None:
        pytest.skip("a GPU is here")
    cuda = OnnxRuntimeTarget(runtime="onnxruntime", device="cuda")
    with pytest.raises(MachineError, match="on_missing: defer"):
        missing_packages.check_target(cuda, "targets.0")
    missing_packages.check_target(cuda.model_copy(update={"on_missing": "defer"}), "targets.0")


def test_bfloat16_is_refused_with_what_to_use_instead(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"bf16 is not lowered for ONNX Runtime.*target vllm"):
        target(tmp_path, "{runtime: onnxruntime, device: cuda, float: bf16}")


@pytest.mark.parametrize("other", ["device: cpu", "device: cuda, provider: tensorrt"])
def test_cuda_graphs_are_refused_where_none_can_be_replayed(tmp_path: Path, other: str) -> None:
    with pytest.raises(RecipeError, match="cuda_graphs: true needs device: cuda"):
        target(tmp_path, f"{{runtime: onnxruntime, {other}, cuda_graphs: true}}")
