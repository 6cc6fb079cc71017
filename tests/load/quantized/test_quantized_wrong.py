"""Each way a quantized folder can be wrong is refused, saying where it is and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from optimizer.foundation.errors import CheckpointError
from optimizer.load.quantized import folder as quantized
from tests.load.quantized import packers
from tests.load.quantized.packers import coded, named, put

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
CT = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
}


def read_all(folder: Path) -> None:
    result = quantized.find(folder)
    assert result is not None
    for weight in result.weights.values():
        weight.read()


def refused(folder: Path, *words: str) -> None:
    """The folder cannot be read; every word is in the message, and it says what to do."""
    with pytest.raises(CheckpointError) as caught:
        read_all(folder)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.fix or caught.value.accepted, "a message says what to do"
    assert caught.value.where


def gptq_parts(bits: int = 4, **options: Any) -> dict[str, Tensor]:
    return packers.gptq(*coded(16, 64, 4, bits, 0, **options), bits)


def folder_of(tmp_path: Path, config: dict[str, Any], parts: dict[str, Tensor]) -> Path:
    return put(tmp_path, config, named("a", parts))


def integer_parts() -> dict[str, Tensor]:
    return {
        "weight": torch.ones(16, 32, dtype=torch.int8),
        "weight_scale": torch.full((16, 1), 0.5, dtype=torch.bfloat16),
    }


def group(**changes: Any) -> dict[str, Any]:
    return {**CT, "config_groups": {"group_0": {**CT["config_groups"]["group_0"], **changes}}}  # type: ignore[index]


@pytest.mark.parametrize("method", ["bitsandbytes", "fp8", "hqq"])
def test_another_quantizer(tmp_path: Path, method: str) -> None:
    refused(folder_of(tmp_path, {"quant_method": method}, gptq_parts()), method, "gptq, awq")


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({**GPTQ, "checkpoint_format": "marlin"}, "marlin"),
        ({**AWQ, "version": "gemv"}, "gemv"),
        ({**AWQ, "bits": 8}, "8 bits"),
        ({**CT, "format": "float-quantized"}, "float-quantized"),
        ({**CT, "format": "dense"}, "dense"),
        (group(format="nvfp4-pack-quantized"), "nvfp4"),
    ],
)
def test_a_variant_that_is_not_read(tmp_path: Path, config: dict[str, Any], word: str) -> None:
    refused(folder_of(tmp_path, config, gptq_parts()), word)


@pytest.mark.parametrize("bits", [2, 3])
def test_bits_that_are_not_read(tmp_path: Path, bits: int) -> None:
    parts = gptq_parts()
    parts["qweight"] = parts["qweight"][: 64 * bits // 32]
    parts["qzeros"] = parts["qzeros"][:, : -(-16 * bits // 32)]
    refused(folder_of(tmp_path, {**GPTQ, "bits": bits}, parts), f"{bits} bits", "4, 8")


@pytest.mark.parametrize("config", [GPTQ, AWQ, CT])
def test_nothing_is_packed(tmp_path: Path, config: dict[str, Any]) -> None:
    refused(
        folder_of(tmp_path, config, {"weight": torch.ones(4, 4)}), "no tensor", "Remove quantiz"
    )


@pytest.mark.parametrize("part", ["qzeros", "scales"])
def test_a_missing_tensor(tmp_path: Path, part: str) -> None:
    parts = gptq_parts()
    del parts[part]
    refused(folder_of(tmp_path, GPTQ, parts), f"{part} is missing", "Get the file again")


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("scales", torch.ones(4, 8).half()),
        ("qzeros", torch.ones(4, 3, dtype=torch.int32)),
        ("g_idx", torch.zeros(63, dtype=torch.int32)),
    ],
)
def test_shapes_that_disagree(tmp_path: Path, part: str, value: Tensor) -> None:
    refused(folder_of(tmp_path, GPTQ, {**gptq_parts(), part: value}))


def test_another_type_of_word(tmp_path: Path) -> None:
    parts = gptq_parts()
    refused(folder_of(tmp_path, GPTQ, {**parts, "qweight": parts["qweight"].long()}), "int64")


def test_a_group_size_the_scales_do_not_have(tmp_path: Path) -> None:
    refused(folder_of(tmp_path, {**GPTQ, "group_size": 32}, gptq_parts()), "group_size 32", "16")


def test_groups_that_do_not_divide_the_inputs(tmp_path: Path) -> None:
    parts = gptq_parts()
    parts |= {"scales": parts["scales"][:3], "qzeros": parts["qzeros"][:3]}
    refused(folder_of(tmp_path, GPTQ, parts), "3 groups do not divide 64")


def test_inputs_in_an_order_of_their_own(tmp_path: Path) -> None:
    parts = gptq_parts()
    order = parts["g_idx"][torch.randperm(64, generator=torch.Generator().manual_seed(0))]
    refused(folder_of(tmp_path, GPTQ, {**parts, "g_idx": order}), "desc_act: false")


def test_a_zero_point_that_is_no_code(tmp_path: Path) -> None:
    parts = gptq_parts()
    refused(
        folder_of(tmp_path, GPTQ, {**parts, "qzeros": torch.full_like(parts["qzeros"], -1)}),
        "a zero point is 16",
        "gptq_v2",
    )


def test_a_checkpoint_format_that_contradicts_sym(tmp_path: Path) -> None:
    config = {**GPTQ, "sym": True, "checkpoint_format": "gptq_v2"}
    parts = gptq_parts(symmetric=True)
    refused(folder_of(tmp_path, config, parts), "a zero point is 7 instead of 8", "minus one")


def test_awq_zero_points_that_contradict_the_config(tmp_path: Path) -> None:
    parts = packers.awq(*coded(16, 64, 4, 4, 0))
    refused(folder_of(tmp_path, {**AWQ, "zero_point": False}, parts), "is not 8")


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_no_scale(tmp_path: Path, bad: float) -> None:
    parts = gptq_parts()
    parts["scales"][0, 0] = bad
    refused(folder_of(tmp_path, GPTQ, parts), "a scale is zero, negative, NaN or infinite")


def test_scales_of_more_digits_than_16_bits_hold(tmp_path: Path) -> None:
    parts = gptq_parts()
    scales = parts["scales"].float() * 1.00001
    refused(folder_of(tmp_path, GPTQ, {**parts, "scales": scales}), "more digits")


@pytest.mark.parametrize(
    "inputs",
    [
        {"num_bits": 4, "strategy": "token", "dynamic": True},
        {"num_bits": 8, "strategy": "tensor", "dynamic": True},
        {"num_bits": 8, "strategy": "token", "dynamic": True, "symmetric": False},
        {"num_bits": 8, "strategy": "token", "dynamic": True, "type": "float"},
    ],
)
def test_inputs_coded_in_a_way_no_state_says(tmp_path: Path, inputs: dict[str, Any]) -> None:
    config = group(input_activations=inputs)
    refused(folder_of(tmp_path, config, integer_parts()), "inputs quantized to", "per token")


def test_a_static_range_between_the_grids_values(tmp_path: Path) -> None:
    inputs = {"num_bits": 8, "strategy": "tensor", "dynamic": False}
    parts = {**integer_parts(), "input_scale": torch.tensor([0.1])}
    refused(folder_of(tmp_path, group(input_activations=inputs), parts), "input_scale 0.1")


@pytest.mark.parametrize(
    "extra",
    [
        {"transform_config": {"config_groups": {"u": {}}}},
        {"kv_cache_scheme": {"num_bits": 8}},
        {"sparsity_config": {"format": "sparse-24-bitmask"}},
    ],
)
def test_what_a_run_would_have_to_apply(tmp_path: Path, extra: dict[str, Any]) -> None:
    refused(folder_of(tmp_path, {**CT, **extra}, integer_parts()), next(iter(extra)), "run time")


def test_weights_that_were_not_compressed(tmp_path: Path) -> None:
    config = {**CT, "quantization_status": "frozen"}
    refused(folder_of(tmp_path, config, integer_parts()), "frozen", "save_compressed")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"strategy": "block"}, ("strategy 'block'",)),
        ({"type": "float"}, ("float8",)),
        ({"num_bits": 4}, ("config has 4 bits",)),
        ({"symmetric": False}, ("weight_zero_point is missing",)),
        ({"strategy": "group", "group_size": 16}, ("group_size 16", "32")),
    ],
)
def test_config_groups_that_are_not_the_tensors(
    tmp_path: Path, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    config = group(weights={**WEIGHTS, **changes})
    refused(folder_of(tmp_path, config, integer_parts()), *words)


def test_two_groups_that_both_fit(tmp_path: Path) -> None:
    one = {"targets": ["Linear"], "weights": WEIGHTS}
    inputs = {"num_bits": 8, "strategy": "token", "dynamic": True}
    other = {"targets": ["Embedding"], "weights": WEIGHTS, "input_activations": inputs}
    config = {**CT, "config_groups": {"a": one, "b": other}}
    refused(folder_of(tmp_path, config, integer_parts()), "2 config groups fit it")


def test_static_and_dynamic_inputs_in_one_folder(tmp_path: Path) -> None:
    token = {"num_bits": 8, "strategy": "token", "dynamic": True}
    static = {"num_bits": 8, "strategy": "tensor", "dynamic": False}
    config = {
        **CT,
        "config_groups": {
            "x": {"targets": ["a"], "weights": WEIGHTS, "input_activations": token},
            "y": {"targets": ["re:b.*"], "weights": WEIGHTS, "input_activations": static},
        },
    }
    parts = {**integer_parts(), "input_scale": torch.tensor([0.5])}
    folder = put(tmp_path, config, named("a", integer_parts()) | named("b1", parts))
    refused(folder, "static ranges and some at run time")


def test_a_symmetric_group_with_a_zero_point(tmp_path: Path) -> None:
    parts = {**integer_parts(), "weight_zero_point": torch.ones(16, 1, dtype=torch.int8)}
    refused(folder_of(tmp_path, CT, parts), "weight_zero_point is not 0")


def test_an_order_of_inputs_in_compressed_tensors(tmp_path: Path) -> None:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16}
    config = {**group(weights=weights), "format": "pack-quantized"}
    parts = {
        "weight_packed": torch.zeros(16, 4, dtype=torch.int32),
        "weight_shape": torch.tensor([16, 32]),
        "weight_scale": torch.ones(16, 2, dtype=torch.bfloat16),
        "weight_g_idx": torch.arange(32).flip(0).to(torch.int32) // 16,
    }
    refused(folder_of(tmp_path, config, parts), "actorder")


def test_a_conv1d_is_no_linear_layer(tmp_path: Path) -> None:
    name = "transformer.h.0.mlp.c_fc"
    folder = put(tmp_path, GPTQ, named(name, gptq_parts()))
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**document, "model_type": "gpt2"}))
    result = quantized.find(folder)
    assert result is not None
    with pytest.raises(CheckpointError, match="not a linear layer"):
        quantized.state(result, {f"{name}.weight": f"{name}.weight"})


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, GPTQ, gptq_parts())
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "without a *.safetensors", "Convert")
