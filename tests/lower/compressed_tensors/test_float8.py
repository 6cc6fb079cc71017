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
from transformers import LlamaConfig, LlamaForCausalLM

from optimizer.compress.methods.weights.rtn import rtn
from optimizer.compress.simulate import fake_quantize, quantize_tokens
from optimizer.foundation import state as compressed_state
from optimizer.foundation.errors import CheckpointError, LedgerError
from optimizer.foundation.qtensor import QTensor, Scheme, expand_rows
from optimizer.foundation.rounding import float8
from optimizer.foundation.state import CompressedState, Range
from optimizer.load.quantized import folder as quantized
from optimizer.lower.compressed_tensors import folder as written_folder
from optimizer.model.checkpoint.checkpoint import Checkpoint, open_checkpoint, read_json
from optimizer.validate.ledger.laws import state_laws
from optimizer.validate.ledger.limits import rounding_limits
from tests.conftest import heavy_tailed
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

F8 = Scheme(8, type="float8")
BLOCKS = Scheme(8, granularity="block", type="float8")
PRESET = preset_name_to_scheme("FP8_DYNAMIC", ["Linear"])
STATIC = preset_name_to_scheme("FP8", ["Linear"])
IN_BLOCKS = preset_name_to_scheme("FP8_BLOCK", ["Linear"])
COVERED = Range.symmetric(4.0)
CODES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
FINITE = CODES[~CODES.float().isnan()]


def bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(torch.uint8)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder whose weights have 2 x 2 blocks, as a load folder holds it."""
    out = tmp_path_factory.mktemp("wide")
    torch.manual_seed(7)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=96,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for linear in model.model.layers.modules():
            if isinstance(linear, torch.nn.Linear):  # each block has another largest value
                linear.weight[:128] *= 3
                linear.weight[:, :128] *= 2
    model.save_pretrained(out / "checkpoint")
    return out


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


def test_blocks_groups_and_static_scales_are_those_of_compressed_tensors() -> None:
    weight = heavy_tailed((256, 384), 4)
    q = rtn(weight, BLOCKS)
    assert q.scale.shape == (2, 3)
    assert torch.equal(bits(q.integers), bits(their_codes(weight, q.scale, IN_BLOCKS.weights)))
    x = torch.cat([heavy_tailed((16, 256), 5), torch.zeros(1, 256)])
    groups = x.reshape(17, 2, 128)
    scale, _ = calculate_qparams(*groups.aminmax(dim=-1), IN_BLOCKS.input_activations)
    codes = their_codes(x, scale, IN_BLOCKS.input_activations).float().reshape(17, 2, 128)
    same = (codes * scale[..., None]).reshape(17, 256)
    assert torch.equal(quantize_tokens(x, "float8 group"), same)
    scale = torch.tensor([COVERED.float8_scale])
    codes = their_codes(x, scale, STATIC.input_activations)
    assert torch.equal(fake_quantize(x, COVERED, "float8 tensor"), codes.float() * scale)


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


@pytest.mark.parametrize("mode", [None, "float8 token", "float8 tensor"])
def test_transformers_computes_what_the_state_says(
    mode: Any, source: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    each = ranges(checkpoint, COVERED) if mode == "float8 tensor" else {}
    state = state_of(checkpoint, F8, activations=mode, ranges=each)
    out = written(checkpoint, state, tmp_path / "out")
    written_folder.verify(out, checkpoint, state, "fp32")
    config = QuantizationConfig.model_validate(
        read_json(out / "config.json")["quantization_config"]
    )
    assert config.format == "float-quantized"
    (group,) = config.config_groups.values()
    assert same_args(group.weights, PRESET.weights)
    preset = {None: None, "float8 tensor": STATIC.input_activations}
    assert same_args(group.input_activations, preset.get(mode, PRESET.input_activations))
    torch.testing.assert_close(
        logits(theirs(out)), logits(ours(source, state)), rtol=1e-4, atol=1e-4
    )


def same_args(a: QuantizationArgs | None, b: QuantizationArgs | None) -> bool:
    """Compare the arguments but for the observer, which is for calibration."""
    return plain(a) == plain(b)


def plain(args: QuantizationArgs | None) -> QuantizationArgs | None:
    return args and args.model_copy(update={"observer": None})


@pytest.mark.parametrize("mode", [None, "float8 group"])
def test_transformers_computes_weights_in_blocks(mode: Any, wide: Path, tmp_path: Path) -> None:
    model = open_checkpoint(wide)
    state = state_of(model, BLOCKS, activations=mode)
    compressed_state.write(state, tmp_path)
    state = compressed_state.read(tmp_path)
    out = written(model, state, tmp_path / "out")
    written_folder.verify(out, model, state, "fp32")
    document = read_json(out / "config.json")["quantization_config"]
    (group,) = QuantizationConfig.model_validate(document).config_groups.values()
    assert same_args(group.weights, IN_BLOCKS.weights)
    assert same_args(group.input_activations, IN_BLOCKS.input_activations if mode else None)
    name = "model.layers.0.mlp.down_proj"
    assert torch.equal(decompressed(out, name), state.weights[f"{name}.weight"].dequantize())
    torch.testing.assert_close(logits(theirs(out)), logits(ours(wide, state)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fault", ["transposed", "neighbour", "larger"])
def test_a_wrong_scale_of_a_block_is_seen_by_the_reader_and_by_the_ledger(
    fault: str, wide: Path, tmp_path: Path
) -> None:
    model = open_checkpoint(wide)
    state = state_of(model, BLOCKS, activations="float8 group")
    out = written(model, state, tmp_path / "out")
    module = "model.layers.0.self_attn.q_proj"
    file, name = out / "model.safetensors", f"{module}.weight"
    tensors, q = load_file(file), state.weights[name]
    scale = q.scale.clone()
    if fault == "transposed":
        scale = scale.t().contiguous()
    elif fault == "neighbour":
        scale[0] = scale[0].flip(0)
    else:
        scale[1, 1] *= 2
    assert not torch.equal(scale, q.scale)
    save_file({**tensors, f"{name}_scale": scale}, file, {"format": "pt"})
    with pytest.raises(LedgerError, match=name):
        written_folder.verify(out, model, state, "fp32")
    assert not torch.equal(decompressed(out, module), q.dequantize())
    weight = model.tensors[name].float()
    assert problem(q, weight) == ""
    again = float8.nearest(weight / expand_rows(scale, 256).repeat_interleave(128, 1))
    assert "a scale that round-to-nearest does not offer" in problem(
        QTensor(again, scale, None, BLOCKS), weight
    )


def test_another_static_scale_is_seen(checkpoint: Checkpoint, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"activations": "float8 tensor", "ranges": ranges(checkpoint, COVERED)}
    state = state_of(checkpoint, F8, **fields)
    out = written(checkpoint, state, tmp_path / "out")
    file, name = out / "model.safetensors", "model.layers.0.mlp.up_proj.input_scale"
    tensors = load_file(file)
    save_file({**tensors, name: tensors[name] * 2}, file, {"format": "pt"})
    with pytest.raises(LedgerError, match="up_proj:input reads back with another static range"):
        written_folder.verify(out, checkpoint, state, "fp32")


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
    return state_laws._weight(q, weight, rounding_limits.derive_nearest(8))
