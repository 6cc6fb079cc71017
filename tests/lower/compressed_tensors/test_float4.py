"""NVFP4 weights, judged by compressed_tensors' own functions and by transformers."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.quantization import (
    FP4_E2M1_DATA,
    QuantizationConfig,
    QuantizationStatus,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import CompressedTensorsConfig

from optimizer.compress.methods.weights.rtn import rtn
from optimizer.compress.simulate import fake_quantize
from optimizer.foundation import state as compressed_state
from optimizer.foundation.errors import LedgerError
from optimizer.foundation.qtensor import QTensor, Scheme, quantize
from optimizer.foundation.rounding import float4
from optimizer.foundation.state import CompressedState, Range
from optimizer.lower.compressed_tensors import folder as written_folder
from optimizer.model.checkpoint.checkpoint import Checkpoint, read_json
from optimizer.recipe.compression import composition
from optimizer.recipe.schema import Quantize
from optimizer.validate.ledger.laws import state_laws
from optimizer.validate.ledger.limits import rounding_limits
from tests.conftest import heavy_tailed
from tests.lower.compressed_tensors.test_float8 import same_args
from tests.lower.compressed_tensors.test_tensors import (
    checkpoint,
    decompressed,
    logits,
    ours,
    ranges,
    source,
    state_of,
    theirs,
    written,
)

__all__ = ["checkpoint", "source"]

F4 = Scheme(4, True, "group", 16, type="float4")
PRESET = preset_name_to_scheme("NVFP4A16", ["Linear"])
WITH_INPUTS = preset_name_to_scheme("NVFP4", ["Linear"])
COVERED = Range.symmetric(4.0)
VALUES = torch.tensor([s * m for s in (1.0, -1.0) for m in float4.MAGNITUDES])
MODULE = "model.layers.0.mlp.up_proj"


def test_values_round_as_compressed_tensors_rounds_and_ties_to_even() -> None:
    middle = (VALUES.unique()[1:] + VALUES.unique()[:-1]) / 2
    x = torch.cat([heavy_tailed((16, 64), 1).flatten(), VALUES, middle, torch.tensor([7.0, -99.0])])
    rounded = float4.nearest(x)
    assert torch.equal(rounded.float(), FP4_E2M1_DATA.cast_to_fp4(x.clamp(-6, 6)))
    assert (float4.steps_away(middle, float4.nearest(middle)) == 0.5).all()
    assert (float4.steps_away(x.clamp(-6, 6), rounded) <= 0.5).all()


def test_codes_are_those_of_compressed_tensors_and_survive_the_state(tmp_path: Path) -> None:
    values = VALUES[torch.randperm(160) % 16].reshape(5, 32).to(torch.float8_e4m3fn)
    assert torch.equal(float4.pack(values), pack_fp4_to_uint8(values.float()))
    q = QTensor(values, float4.to_scale_grid(torch.rand(5, 2)), None, F4)
    compressed_state.write(CompressedState({"a.weight": q}), tmp_path)
    read = compressed_state.read(tmp_path).weights["a.weight"]
    assert read.scheme == F4
    assert torch.equal(read.dequantize(), q.dequantize())
    for wrong in (q.scale * 1.01, q.scale * 8):
        with pytest.raises(ValueError, match="scale"):
            QTensor(values, wrong, None, F4)


def test_scales_of_a_search_err_less_than_those_that_cover() -> None:
    weight = 0.05 * heavy_tailed((32, 64), 2)
    q = rtn(weight, F4)
    cover = weight.reshape(32, 4, 16).abs().amax(-1) / 6
    covering = quantize(weight, float4.to_scale_grid(cover), None, F4)
    assert (q.dequantize() - weight).norm() < (covering.dequantize() - weight).norm()
    with pytest.raises(ValueError, match=r"FP4 holds weights up to 10\.5"):
        rtn(torch.full((2, 16), 11.0), F4)


def test_transformers_computes_what_the_state_says(
    source: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    state = state_of(checkpoint, F4)
    out = written(checkpoint, state, tmp_path / "out", "bf16")
    written_folder.verify(out, checkpoint, state, "bf16")
    document = read_json(out / "config.json")["quantization_config"]
    config = QuantizationConfig.model_validate(document)
    assert config.format == "nvfp4-pack-quantized"
    (group,) = config.config_groups.values()
    assert group.weights == PRESET.weights
    assert torch.equal(
        decompressed(out, MODULE).float(), state.weights[f"{MODULE}.weight"].dequantize()
    )
    whole = CompressedTensorsConfig(dequantize=True)
    model = theirs(written(checkpoint, state, tmp_path / "fp32"), quantization_config=whole)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    torch.testing.assert_close(logits(model), logits(ours(source, state)), rtol=1e-4, atol=1e-4)


def test_inputs_round_as_compressed_tensors_rounds_them() -> None:
    x = heavy_tailed((64, 128), 4) * torch.logspace(-5, 1, 64)[:, None]
    x[3], x[4, :16] = 0, 0
    covered = Range.symmetric(float(x.abs().max()))
    module = torch.nn.Linear(128, 1)
    module.quantization_status = QuantizationStatus.COMPRESSED
    module.input_global_scale = torch.tensor([covered.float4_global_scale])
    theirs_ = forward_quantize(module, x, "input", WITH_INPUTS.input_activations)
    assert torch.equal(fake_quantize(x, covered, "float4 group"), theirs_)


@given(st.floats(1e-3, 1e6))
def test_the_global_scale_of_inputs_is_the_largest_power_of_two_that_covers(absmax: float) -> None:
    covered = Range.symmetric(absmax)
    number, largest = covered.float4_global_scale, max(-covered.low, covered.high)
    assert math.frexp(number)[0] == 0.5
    assert number * largest / 6 <= 448 < 2 * number * largest / 6


def test_transformers_computes_what_the_state_says_with_inputs_in_nvfp4(
    source: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    each = ranges(checkpoint, COVERED)
    state = state_of(checkpoint, F4, activations="float4 group", ranges=each)
    out = written(checkpoint, state, tmp_path / "out")
    written_folder.verify(out, checkpoint, state, "fp32")
    document = read_json(out / "config.json")["quantization_config"]
    (group,) = QuantizationConfig.model_validate(document).config_groups.values()
    assert group.weights == WITH_INPUTS.weights
    assert same_args(group.input_activations, WITH_INPUTS.input_activations)
    model = theirs(out)
    model.hf_quantizer.compressor.decompress_model(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    computed, expected = logits(model), logits(ours(source, state))
    torch.testing.assert_close(computed, expected, rtol=1e-4, atol=1e-4)
    alone = logits(ours(source, replace(state, activations=None, ranges={})))
    assert (alone - expected).abs().max() > 100 * (computed - expected).abs().max()


@pytest.mark.parametrize("fault", ["nibbles", "scale of a neighbour", "global scale"])
def test_a_fault_of_the_folder_is_seen(fault: str, checkpoint: Checkpoint, tmp_path: Path) -> None:
    state = state_of(checkpoint, F4)
    out = written(checkpoint, state, tmp_path / "out")
    tensors = load_file(out / "model.safetensors")
    packed, scale = tensors[f"{MODULE}.weight_packed"], tensors[f"{MODULE}.weight_scale"]
    changed: dict[str, Any] = {
        "nibbles": {"weight_packed": packed // 16 + packed % 16 * 16},
        "scale of a neighbour": {"weight_scale": scale.float().roll(1, 1).to(scale.dtype)},
        "global scale": {"weight_global_scale": tensors[f"{MODULE}.weight_global_scale"] * 2},
    }
    tensors |= {f"{MODULE}.{part}": value for part, value in changed[fault].items()}
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(LedgerError, match=MODULE):
        written_folder.verify(out, checkpoint, state, "fp32")
    expected = state.weights[f"{MODULE}.weight"].dequantize()
    assert not torch.equal(decompressed(out, MODULE).float(), expected)


def test_the_ledger_sees_a_value_off_by_one_and_another_scale() -> None:
    weight = 0.05 * heavy_tailed((8, 64), 3)
    q = rtn(weight, F4)
    assert problem(q, weight) == ""
    codes = float4.pack(q.integers)
    codes[3, 5] ^= 1
    moved = QTensor(float4.unpack(codes), q.scale, None, F4)
    assert "row 3 group 0" in problem(moved, weight)
    other = quantize(weight, float4.to_scale_grid(q.scale * 2), None, F4)
    assert "a scale that round-to-nearest does not offer" in problem(other, weight)


def problem(q: QTensor, weight: torch.Tensor) -> str:
    return state_laws._weight(q, weight, rounding_limits.derive_nearest(4))


def test_a_recipe_names_the_type_alone() -> None:
    both = {"weights": {"type": "float4"}, "activations": {"type": "float4"}}
    quantize = Quantize.model_validate(both)
    assert (quantize.weights.bits, quantize.weights.group_size) == (4, 16)
    assert quantize.activations is not None
    assert quantize.activations.mode == "float4 group"
    assert quantize.calibrated
    with pytest.raises(ValueError, match="leave these out"):
        Quantize.model_validate({"weights": {"type": "float4", "group_size": 32}})


@pytest.mark.parametrize(
    ("weights", "activations", "words"),
    [
        ({"type": "float4"}, {"type": "float8"}, "use activations: {type: float4}"),
        ({"type": "float4"}, {}, "use activations: {type: float4}"),
        ({"type": "float8"}, {"type": "float4"}, "{type: float8, granularity: token}"),
        ({}, {"type": "float4"}, "weights has type: int beside type: float4"),
        ({"type": "float4"}, {"type": "float4", "granularity": "token"}, "granularity: group"),
        ({"type": "float4"}, {"type": "float4", "range": "mse"}, "chooses the step of integers"),
    ],
)
def test_inputs_of_another_type_than_the_weights_are_refused(
    weights: dict[str, Any], activations: dict[str, Any], words: str
) -> None:
    given_ = {"method": "rtn", "weights": weights, "activations": activations}
    with pytest.raises(ValueError, match=re.escape(words)):
        composition.check(Quantize.model_validate(given_))
