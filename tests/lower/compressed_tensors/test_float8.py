"""FP8 weights and activations, judged by compressed_tensors' own rounding and by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.lifecycle.forward import quantize as their_quantize
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

from optimizer.compress.methods.weights.rtn import rtn
from optimizer.compress.simulate import quantize_tokens
from optimizer.foundation import state as compressed_state
from optimizer.foundation.errors import CheckpointError, LedgerError
from optimizer.foundation.qtensor import QTensor, Scheme
from optimizer.foundation.rounding import float8
from optimizer.foundation.state import CompressedState
from optimizer.load.quantized import folder as quantized
from optimizer.lower.compressed_tensors import folder as written_folder
from optimizer.model.checkpoint.checkpoint import Checkpoint, read_json
from optimizer.validate.ledger.laws import state_laws
from optimizer.validate.ledger.limits import rounding_limits
from tests.conftest import heavy_tailed
from tests.lower.compressed_tensors.test_tensors import (
    checkpoint,
    logits,
    ours,
    source,
    state_of,
    theirs,
    written,
)

__all__ = ["checkpoint", "source"]

F8 = Scheme(8, type="float8")
PRESET = preset_name_to_scheme("FP8_DYNAMIC", ["Linear"])
CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
FINITE = CODES[~CODES.float().isnan()]


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.uint8)


def their_codes(x: torch.Tensor, scale: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    return their_quantize(x, scale, torch.zeros_like(scale), args, dtype=torch.float8_e4m3fn)


def test_codes_of_weights_are_those_of_compressed_tensors() -> None:
    weight = heavy_tailed((64, 96), 1)
    q = rtn(weight, F8)
    assert torch.equal(bits(q.integers), bits(their_codes(weight, q.scale, PRESET.weights)))
    own, _ = calculate_qparams(*weight.aminmax(dim=1, keepdim=True), PRESET.weights)
    torch.testing.assert_close(q.scale, own, rtol=2.0**-8, atol=0)  # rounded to the bfloat16 grid


def test_tokens_are_those_of_compressed_tensors() -> None:
    x = torch.cat([heavy_tailed((32, 96), 2), torch.zeros(1, 96)])
    scale, _ = calculate_qparams(*x.aminmax(dim=1, keepdim=True), PRESET.input_activations)
    codes = their_codes(x, scale, PRESET.input_activations)
    assert torch.equal(quantize_tokens(x, "float8 token"), codes.float() * scale)


def test_every_code_survives_state_folder_and_their_reader(tmp_path: Path) -> None:
    q = QTensor(FINITE.reshape(2, -1), torch.tensor([[0.5], [2.0**-14]]), None, F8)
    compressed_state.write(CompressedState({"a.weight": q}), tmp_path)
    read = compressed_state.read(tmp_path).weights["a.weight"]
    assert read.scheme == F8
    assert torch.equal(bits(read.integers), bits(q.integers))
    assert torch.equal(bits(rtn(q.dequantize(), F8).integers), bits(q.integers))
    with pytest.raises(ValueError, match="NaN"):
        QTensor(CODES.reshape(2, -1), q.scale, None, F8)


def test_values_round_to_the_nearest_code_and_ties_to_even() -> None:
    values = FINITE.float().unique()
    middle = (values[1:] + values[:-1]) / 2
    even = bits(float8.nearest(middle)) % 2 == 0
    assert even.all()
    for side in (values[1:], values[:-1]):
        assert (float8.steps_away(middle, side.to(torch.float8_e4m3fn)) == 0.5).all()
    assert float8.nearest(torch.tensor([449.0, 1e9, -1e9])).tolist() == [448, 448, -448]


@pytest.mark.parametrize("mode", [None, "float8 token"])
def test_transformers_computes_what_the_state_says(
    mode: Any, source: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    state = state_of(checkpoint, F8, activations=mode)
    out = written(checkpoint, state, tmp_path / "out")
    written_folder.verify(out, checkpoint, state, "fp32")
    config = QuantizationConfig.model_validate(
        read_json(out / "config.json")["quantization_config"]
    )
    assert config.format == "float-quantized"
    (group,) = config.config_groups.values()
    assert group.weights == PRESET.weights.model_copy(update={"observer": group.weights.observer})
    assert (group.input_activations is None) == (mode is None)
    torch.testing.assert_close(
        logits(theirs(out)), logits(ours(source, state)), rtol=1e-4, atol=1e-4
    )


def test_a_folder_of_another_code_or_scale_is_seen_and_not_loaded_as_floats(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    state = state_of(checkpoint, F8)
    out = written(checkpoint, state, tmp_path / "out")
    file, name = out / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(file)
    with pytest.raises(CheckpointError, match="F8_E4M3"):
        quantized.find(out)
    for part in (name, f"{name}_scale"):
        moved = {**tensors, part: tensors[part].flip(0).contiguous()}
        save_file(moved, file, {"format": "pt"})
        with pytest.raises(LedgerError, match=name):
            written_folder.verify(out, checkpoint, state, "fp32")


def test_the_ledger_sees_a_code_off_by_one_and_the_scale_of_another_row() -> None:
    weight = heavy_tailed((16, 64), 3)
    q = rtn(weight, F8)
    assert problem(q, weight) == ""
    for column in range(64):
        codes = q.integers.clone()
        bits(codes)[3, column] -= 1  # toward 0, whatever the sign
        if not codes.float().isnan().any():
            assert "row 3 group 0" in problem(QTensor(codes, q.scale, None, F8), weight)
    scale = q.scale.clone()
    scale[[4, 5]] = scale[[5, 4]]
    again = QTensor(float8.nearest(weight / scale), scale, None, F8)
    assert "a scale that round-to-nearest does not offer" in problem(again, weight)


def problem(q: QTensor, weight: torch.Tensor) -> str:
    return state_laws._weight(q, weight, rounding_limits.alone(8))
