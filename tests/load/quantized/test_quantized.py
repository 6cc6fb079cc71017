"""Quantized folders of three formats, read exactly: each reader against the other project's own
unpacking."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from optimizer.foundation import safetensors_stream
from optimizer.foundation import state as compressed_state
from optimizer.foundation.errors import CheckpointError, LedgerError
from optimizer.foundation.qtensor import Scheme
from optimizer.foundation.state import Note
from optimizer.load.quantized import folder as quantized
from optimizer.lower.compressed_tensors import tensors as compressed_tensors
from optimizer.model.checkpoint.checkpoint import TensorPlace, read_entry
from tests.load.quantized import packers
from tests.load.quantized.packers import coded, linears, named, put

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "sym": False, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
quick = settings(max_examples=40, deadline=None)
shapes = st.tuples(st.integers(1, 4), st.integers(1, 4), st.sampled_from([16, 32, 64]))


def found(folder: Path) -> quantized.QuantizedTensors:
    result = quantized.find(folder)
    assert result is not None
    return result


def test_a_float_folder_is_not_quantized(tiny_llama: Path) -> None:
    assert quantized.find(tiny_llama) is None


@quick
@given(shapes, st.sampled_from([4, 8]), st.booleans(), st.sampled_from([1, 2]), st.integers(0, 999))
def test_gptq_reads_what_autogptq_multiplies_with(
    tmp_path_factory: pytest.TempPathFactory,
    shape: tuple[int, int, int],
    bits: int,
    symmetric: bool,
    version: int,
    seed: int,
) -> None:
    rows, groups, size = shape
    values = coded(8 * rows, groups * size, groups, bits, seed, symmetric=symmetric)
    packed = packers.gptq(*values, bits, version=version)
    form = "gptq" if version == 1 else "gptq_v2"
    config = {**GPTQ, "bits": bits, "group_size": size, "sym": symmetric, "checkpoint_format": form}
    folder = put(tmp_path_factory.mktemp("gptq"), config, named("a", packed))
    q = found(folder).weights["a.weight"].read()
    assert torch.equal(q.dequantize(), packers.gptq_values(packed, bits, version=version))
    assert torch.equal(q.integers.int() + (1 << (bits - 1)), values[0].int())
    assert torch.equal(q.scale, values[2].float())
    assert (q.zero_point is None) is symmetric


@quick
@given(shapes, st.integers(0, 999))
def test_awq_reads_what_autoawq_multiplies_with(
    tmp_path_factory: pytest.TempPathFactory, shape: tuple[int, int, int], seed: int
) -> None:
    rows, groups, size = shape
    values = coded(8 * rows, groups * size, groups, 4, seed)
    packed = packers.awq(*values)
    folder = tmp_path_factory.mktemp("awq")
    put(folder, {**AWQ, "group_size": size}, named("a", packed))
    q = found(folder).weights["a.weight"].read()
    assert torch.equal(q.dequantize(), packers.awq_values(packed))
    assert torch.equal(q.integers.int() + 8, values[0].int())


def test_the_words_of_gptq_are_these(tmp_path: Path) -> None:
    """Inputs 0..7 of output 0 are the integers 1, 2, ... 8: nibbles from the lowest."""
    tensors = {
        "qweight": torch.from_numpy(np.array([[0x87654321] + [0] * 7], np.uint32).view(np.int32)),
        "qzeros": torch.tensor([[0x77777776]], dtype=torch.int32),  # 7 for output 0, 8 for others
        "scales": torch.full((1, 8), 0.5, dtype=torch.float16),
    }
    config = {**GPTQ, "group_size": -1}
    q = found(put(tmp_path, config, named("a", tensors))).weights["a.weight"].read()
    assert q.scheme == Scheme(4, False, "channel")
    assert q.dequantize()[0].tolist() == [-3.0, -2.5, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5]
    assert q.dequantize()[1].tolist() == [-4.0] * 8


def test_the_words_of_awq_are_these(tmp_path: Path) -> None:
    """Outputs 0..7 of one input are the integers 0..7, stored in the order 0 2 4 6 1 3 5 7."""
    tensors = {
        "qweight": torch.tensor([[0x75316420]], dtype=torch.int32),
        "qzeros": torch.tensor([[0x00000000]], dtype=torch.int32),
        "scales": torch.ones(1, 8, dtype=torch.float16),
    }
    config = {**AWQ, "group_size": -1}
    q = found(put(tmp_path, config, named("a", tensors))).weights["a.weight"].read()
    assert q.dequantize()[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]


def test_bits_of_a_module_of_its_own_are_seen_in_its_shapes(tmp_path: Path) -> None:
    small, large = coded(16, 64, 4, 4, 0), coded(16, 64, 2, 8, 1)
    tensors = named("a", packers.gptq(*small, 4)) | named("b", packers.gptq(*large, 8))
    config = {**GPTQ, "dynamic": {"+:b": {"bits": 8, "group_size": 32}}}
    both = found(put(tmp_path, config, tensors)).weights
    assert both["a.weight"].read().scheme == Scheme(4, False, "group", 16)
    assert both["b.weight"].read().scheme == Scheme(8, False, "group", 32)


@pytest.mark.parametrize(
    ("file", "config", "pack"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 16, "sym": False}, "gptq"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 16, "version": "GEMM"}, "awq"),
    ],
)
def test_the_config_file_of_older_tools_is_read(
    tmp_path: Path, file: str, config: dict[str, Any], pack: str
) -> None:
    values = coded(8, 32, 2, 4, 0)
    tensors = packers.gptq(*values, 4) if pack == "gptq" else packers.awq(*values)
    put(tmp_path, {}, named("a", tensors))
    (tmp_path / file).write_text(json.dumps(config))
    result = found(tmp_path)
    assert result.method == pack
    assert torch.equal(result.weights["a.weight"].read().integers.int() + 8, values[0].int())


def test_awq_without_zero_points_is_symmetric(tmp_path: Path) -> None:
    packed = packers.awq(*coded(8, 32, 2, 4, 0, symmetric=True))
    del packed["qzeros"]
    config = {**AWQ, "zero_point": False}
    q = found(put(tmp_path, config, named("a", packed))).weights["a.weight"].read()
    assert q.zero_point is None


def test_tensors_that_are_not_coded_stay_what_they_are(tmp_path: Path) -> None:
    bias = torch.linspace(0, 1, 8).half()
    tensors = named("a", packers.awq(*coded(8, 32, 2, 4, 0))) | {"a.bias": bias}
    stored = found(put(tmp_path, AWQ, tensors)).stored
    assert list(stored) == ["a.bias", "a.weight"]
    entry = stored["a.bias"]
    assert isinstance(entry, TensorPlace)
    assert torch.equal(read_entry(entry), bias)
    assert stored["a.weight"].shape == (8, 32)
    assert stored["a.weight"].dtype.is_floating_point


# compressed-tensors: written by its own compressors


def compressed(
    folder: Path, source: Path, weights: dict[str, Any], inputs: dict[str, Any] | None, form: str
) -> dict[str, Tensor]:
    """The linear layers of a checkpoint, packed by compressed_tensors; the values it reads back."""
    document = {"weights": weights, "input_activations": inputs, "targets": ["Linear"]}
    scheme = QuantizationScheme.model_validate(document)
    packer = BaseCompressor.get_value_from_registry(form)
    tensors, values = {}, {}
    high = 2 ** (weights["num_bits"] - 1) - 1
    for name, weight in linears(source).items():
        module = name.removesuffix(".weight")
        size = weights.get("group_size") or weight.shape[1]
        rows = weight.reshape(len(weight), -1, size)
        local = {"weight": weight.half(), "weight_scale": (rows.abs().amax(-1) / high).half()}
        if weights["strategy"] == "tensor":
            local["weight_scale"] = local["weight_scale"].max().reshape(1)
        if not weights["symmetric"]:
            g = torch.Generator().manual_seed(len(tensors))
            shape = local["weight_scale"].shape
            local["weight_zero_point"] = torch.randint(-4, 4, shape, generator=g).to(torch.int8)
        packed = packer.compress(local, scheme)
        exact = {n: t.float() if n == "weight_scale" else t for n, t in packed.items()}
        values[name] = packer.decompress(exact, scheme)["weight"]
        if inputs is not None and not inputs["dynamic"]:
            packed["input_scale"] = torch.tensor([0.03125]).half()
            if not inputs["symmetric"]:
                packed["input_zero_point"] = torch.tensor([-5], dtype=torch.int8)
        tensors |= named(module, packed)
    config = {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": document},
    }
    put(folder, config, tensors)
    return values


def weights_of(bits: int, symmetric: bool, strategy: str, size: int | None) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": strategy,
        "group_size": size,
        "dynamic": False,
    }


TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "tensor", "dynamic": False}


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("bits", "strategy", "size", "form"),
    [
        (4, "group", 16, "pack-quantized"),
        (4, "channel", None, "pack-quantized"),
        (3, "group", 32, "pack-quantized"),
        (8, "group", 32, "pack-quantized"),
        (8, "tensor", None, "int-quantized"),
        (8, "channel", None, "int-quantized"),
        (8, "channel", None, "naive-quantized"),
    ],
)
def test_compressed_tensors_reads_what_its_own_decompressor_does(
    tiny_llama: Path,
    tmp_path: Path,
    bits: int,
    strategy: str,
    size: int | None,
    form: str,
    symmetric: bool,
) -> None:
    weights = weights_of(bits, symmetric, strategy, size)
    values = compressed(tmp_path / "ct", tiny_llama, weights, None, form)
    result = found(tmp_path / "ct")
    assert result.weights.keys() == values.keys()
    for name, value in values.items():
        q = result.weights[name].read()
        assert q.scheme == Scheme(bits, symmetric, strategy, size)  # type: ignore[arg-type]
        assert torch.equal(q.dequantize(), value)


def test_zero_points_that_older_writers_left_unpacked_are_read(
    tiny_llama: Path, tmp_path: Path
) -> None:
    weights = weights_of(4, False, "group", 16)
    values = compressed(tmp_path / "ct", tiny_llama, weights, None, "pack-quantized")
    name = "model.layers.0.mlp.up_proj"
    zero = found(tmp_path / "ct").weights[f"{name}.weight"].read().zero_point
    assert zero is not None
    edit(tmp_path / "ct", {f"{name}.weight_zero_point": zero})
    again = found(tmp_path / "ct").weights[f"{name}.weight"].read()
    assert torch.equal(again.dequantize(), values[f"{name}.weight"])


def test_coded_inputs_are_part_of_the_state(tiny_llama: Path, tmp_path: Path) -> None:
    weights = weights_of(8, True, "channel", None)
    for inputs, kind in ((TOKEN, "token"), (STATIC, "tensor")):
        compressed(tmp_path / kind, tiny_llama, weights, inputs, "int-quantized")
        result = found(tmp_path / kind)
        state = quantized.state(result, {n: n for n in result.stored})
        assert state.activations == kind
    site = "model.layers.0.mlp.up_proj:input"
    assert state.ranges.keys() == {f"{n.removesuffix('.weight')}:input" for n in result.weights}
    assert (state.ranges[site].scale, state.ranges[site].zero_point) == (0.03125, 123)


def test_what_we_write_is_read_back(tiny_llama: Path, tmp_path: Path) -> None:
    """Mixed schemes, one module with a float input, an asymmetric static range."""
    from optimizer.foundation.state import CompressedState, Range
    from optimizer.model.checkpoint.checkpoint import open_checkpoint
    from tests.lower.states import rounded

    shutil.copytree(tiny_llama, tmp_path / "load" / "checkpoint")
    checkpoint = open_checkpoint(tmp_path / "load")
    modules = [n.removesuffix(".weight") for n in linears(checkpoint.folder)]
    only = modules[3]
    state = CompressedState(
        {
            f"{m}.weight": rounded(
                checkpoint.tensors[f"{m}.weight"],
                Scheme(4, False, "group", 16) if m == only else Scheme(8),
            )
            for m in modules
        },
        ranges={f"{m}:input": Range(-1.0, 3.0) for m in modules if m != only},
        activations="tensor",
        notes=(Note(only, "weight-only", "its input is float in the checkpoint"),),
    )
    (tmp_path / "ct").mkdir()
    compressed_tensors.write(checkpoint, state, tmp_path / "ct", "bf16")
    result = found(tmp_path / "ct")
    again = quantized.state(result, {n: n for n in result.stored})
    assert again.notes == state.notes
    assert again.activations == "tensor"
    for site, covered in state.ranges.items():
        kept = again.ranges[site]
        assert (kept.scale, kept.zero_point) == (covered.scale, covered.zero_point)
    for name, q in state.weights.items():
        assert torch.equal(again.weights[name].dequantize(), q.dequantize())


# the load folder of a quantized source


def loaded(result: quantized.QuantizedTensors, folder: Path, out: Path) -> dict[str, str]:
    """Write the load stage's files: every stored tensor, under a name without "model."."""
    names = {n.removeprefix("model."): n for n in result.stored}
    (out / "checkpoint").mkdir(parents=True)
    shutil.copyfile(folder / "config.json", out / "checkpoint" / "config.json")

    def entries() -> Any:
        for parameter, name in names.items():
            entry = result.stored[name]
            coded = isinstance(entry, quantized.QuantizedWeight)
            yield parameter, entry.dequantize() if coded else read_entry(entry)  # type: ignore

    safetensors_stream.write(entries(), out / "checkpoint" / "model.safetensors")
    return names


@pytest.fixture
def gptq_folder(tmp_path: Path) -> Path:
    """Two layers of GPTQ, symmetric, and a norm."""
    tensors = {"model.norm.weight": torch.ones(32).half()}
    for i in range(2):
        packed = packers.gptq(*coded(16, 32, 2, 4, i, symmetric=True), 4)
        tensors |= named(f"model.layers.{i}.mlp.up_proj", packed)
    return put(tmp_path / "source", {**GPTQ, "sym": True}, tensors)


def test_the_load_folder_keeps_the_codes_beside_their_floats(
    gptq_folder: Path, tmp_path: Path
) -> None:
    names = loaded(found(gptq_folder), gptq_folder, tmp_path / "out")
    quantized.write_state(gptq_folder, names, tmp_path / "out")
    state = compressed_state.read(tmp_path / "out" / "quantized")
    floats = load_file(tmp_path / "out" / "checkpoint" / "model.safetensors")
    assert set(state.weights) == {"layers.0.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight"}
    assert set(floats) == {*state.weights, "norm.weight"}
    for name, q in state.weights.items():
        assert torch.equal(floats[name], q.dequantize())
        assert q.scheme == Scheme(4, True, "group", 16)
    config = json.loads((tmp_path / "out" / "checkpoint" / "config.json").read_text())
    assert config == {"model_type": "llama"}


def test_a_float_source_keeps_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    quantized.write_state(tiny_llama, {}, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_is_not_what_the_codes_say_is_refused(
    gptq_folder: Path, tmp_path: Path
) -> None:
    names = loaded(found(gptq_folder), gptq_folder, tmp_path / "out")
    a, b = (f"layers.{i}.mlp.up_proj.weight" for i in range(2))
    with pytest.raises(LedgerError, match="differs from its de-quantized integers"):
        quantized.write_state(gptq_folder, {**names, a: names[b], b: names[a]}, tmp_path / "out")


def edit(folder: Path, changes: dict[str, Tensor | None]) -> None:
    """Set or remove tensors of a folder."""
    from safetensors.torch import save_file

    tensors = {n: t.clone() for n, t in load_file(folder / "model.safetensors").items()}
    for name, value in changes.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors")


def test_a_coded_weight_that_the_model_does_not_ask_for_is_named(gptq_folder: Path) -> None:
    result = found(gptq_folder)
    names = {n: n for n in result.stored if ".1." not in n}
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight is quantized"):
        quantized.state(result, names)


def test_fp16_scales_of_another_tool_survive_writing_the_state(
    gptq_folder: Path, tmp_path: Path
) -> None:
    result = found(gptq_folder)
    state = quantized.state(result, {n: n for n in result.stored})
    compressed_state.write(state, tmp_path)
    again = compressed_state.read(tmp_path)
    for name, q in state.weights.items():
        assert torch.equal(again.weights[name].scale, q.scale)
        assert not torch.equal(q.scale, q.scale.bfloat16().float())  # so the test can fail
