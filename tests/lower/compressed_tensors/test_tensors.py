"""The compressed-tensors folder, judged by compressed_tensors' own readers and by transformers."""

from __future__ import annotations

import dataclasses
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from optimizer.compress.simulate import simulate_state
from optimizer.foundation import packing
from optimizer.foundation import state as compressed_state
from optimizer.foundation.errors import LedgerError, OptimizeError, RecipeError
from optimizer.foundation.qtensor import QTensor, Scheme, absmax_scale, quantize
from optimizer.foundation.state import CompressedState, Note, Range
from optimizer.harness.inputs.batch import Batch
from optimizer.lower import stage as lower
from optimizer.lower.compressed_tensors import folder as compressed_tensors_folder
from optimizer.lower.compressed_tensors import tensors as compressed_tensors
from optimizer.model.checkpoint.checkpoint import (
    Checkpoint,
    open_checkpoint,
    read_header,
    read_json,
)
from optimizer.recipe.schema import CompressedTensorsTarget
from optimizer.validate.formats import modules
from tests.conftest import heavy_tailed
from tests.harness import small_model
from tests.lower.states import rounded

W8, W4 = Scheme(8), Scheme(4, True, "group", 32)
W4_ASYMMETRIC = Scheme(4, False, "group", 16)
SCHEMES = [
    W4,
    W4_ASYMMETRIC,
    Scheme(4),
    Scheme(4, False),
    Scheme(3, True, "group", 32),
    Scheme(8),
    Scheme(8, granularity="tensor"),
    Scheme(8, True, "group", 64),
]
IDS = torch.arange(3, 67).reshape(2, 32)
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def source(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny decoder as a load folder holds it."""
    out = tmp_path_factory.mktemp("load")
    shutil.copytree(tiny_llama, out / "checkpoint")
    return out


@pytest.fixture(scope="module")
def checkpoint(source: Path) -> Checkpoint:
    return open_checkpoint(source)


def linears(checkpoint: Checkpoint) -> list[str]:
    return [n for n in checkpoint.tensors if len(checkpoint.shape(n)) == 2 and n != EMBEDDING]


def state_of(checkpoint: Checkpoint, scheme: Scheme, **fields: Any) -> CompressedState:
    weights = {n: rounded(checkpoint.tensors[n], scheme) for n in linears(checkpoint)}
    return CompressedState(weights, **fields)


def ranges(checkpoint: Checkpoint, each: Range) -> dict[str, Range]:
    return {f"{n.removesuffix('.weight')}:input": each for n in linears(checkpoint)}


def written(
    checkpoint: Checkpoint, state: CompressedState, out: Path, float_type: Any = "fp32"
) -> Path:
    out.mkdir()
    compressed_tensors.write(checkpoint, state, out, float_type)
    return out


def theirs(folder: Path, **options: Any) -> Any:
    """Load the folder in transformers; every tensor must have found its place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", output_loading_info=True, **options
        )
    assert not any(info.values()), info
    return model.eval()


def ours(source: Path, state: CompressedState, untied: bool = False) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source / "checkpoint", attn_implementation="eager", dtype=torch.float32
    )
    if untied:
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return simulate_state(model.eval(), state)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits.float()


def decompressed(folder: Path, module: str) -> Tensor:
    """A weight by compressed_tensors' own decompressor."""
    config = QuantizationConfig.model_validate(
        read_json(folder / "config.json")["quantization_config"]
    )
    groups = [g for g in config.config_groups.values() if isinstance(g, QuantizationScheme)]
    named = [g for g in groups if module in g.targets]
    group = (named or [g for g in groups if "Linear" in g.targets])[0]
    tensors = load_file(folder / "model.safetensors")
    local = {
        n.removeprefix(f"{module}."): t for n, t in tensors.items() if n.startswith(f"{module}.")
    }
    reader = BaseCompressor.get_value_from_registry(group.format or config.format)
    weight: Tensor = reader.decompress(local, group)["weight"]
    return weight


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 100), st.sampled_from([3, 4, 8]), st.integers(0, 10_000))
def test_words_are_those_of_compressed_tensors(
    rows: int, columns: int, bits: int, seed: int
) -> None:
    half = 1 << (bits - 1)
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(-half, half, (rows, columns), generator=g).to(torch.int8)
    words = compressed_tensors.pack(codes, bits)
    assert torch.equal(words, pack_to_int32(codes, bits))
    assert torch.equal(unpack_from_int32(words, bits, codes.shape), codes)
    back = packing.to_signed(packing.unpack32(words.numpy(), bits, columns), bits)
    assert np.array_equal(back, codes.numpy())


def test_a_code_that_does_not_fit_its_bits_is_not_packed() -> None:
    with pytest.raises(ValueError, match="does not fit 4 unsigned bits"):
        packing.pack32(np.array([[16]], np.uint8), 4)


@pytest.mark.parametrize("float_type", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_their_decompressor_gives_the_states_values(
    checkpoint: Checkpoint, tmp_path: Path, scheme: Scheme, float_type: str
) -> None:
    state = state_of(checkpoint, scheme)
    folder = written(checkpoint, state, tmp_path / "out", float_type)
    dtype = compressed_tensors.DTYPES[float_type]
    for name, q in state.weights.items():
        found = decompressed(folder, name.removesuffix(".weight"))
        assert found.dtype == dtype
        assert torch.equal(found.float(), q.dequantize().to(dtype).float())


@pytest.mark.parametrize("scheme", [W4, Scheme(4), Scheme(8), Scheme(3, True, "group", 32)])
def test_transformers_computes_what_the_state_says(
    source: Path, checkpoint: Checkpoint, tmp_path: Path, scheme: Scheme
) -> None:
    state = state_of(checkpoint, scheme)
    found = theirs(written(checkpoint, state, tmp_path / "out"))
    torch.testing.assert_close(logits(found), logits(ours(source, state)))


def test_transformers_reads_asymmetric_weights_when_told_to_decode_them(
    source: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    state = state_of(checkpoint, W4_ASYMMETRIC)
    folder = written(checkpoint, state, tmp_path / "out")
    config = transformers.CompressedTensorsConfig(dequantize=True)
    found = theirs(folder, quantization_config=config)
    torch.testing.assert_close(logits(found), logits(ours(source, state)))


@pytest.mark.parametrize("each", [Range.symmetric(4.0), Range(-3.0, 5.0)])
def test_static_ranges_code_the_same_inputs(
    source: Path, checkpoint: Checkpoint, tmp_path: Path, each: Range
) -> None:
    state = state_of(checkpoint, Scheme(8), activations="tensor", ranges=ranges(checkpoint, each))
    found = theirs(written(checkpoint, state, tmp_path / "out"))
    names = [n.removesuffix(".weight") for n in linears(checkpoint)]
    real = np.ones(IDS.shape, bool)
    batch = Batch({"input_ids": IDS.numpy(), "attention_mask": real.astype(np.int64)}, (), (), real)
    # alone: one integer across a tie would move all logits
    judged = modules.judge(found, ours(source, state), names, [batch])
    assert [piece.problem for piece in judged if not piece.fine] == []


def test_a_symmetric_range_needs_no_zero_point(checkpoint: Checkpoint, tmp_path: Path) -> None:
    fields = {"activations": "tensor", "ranges": ranges(checkpoint, Range.symmetric(4.0))}
    folder = written(checkpoint, state_of(checkpoint, Scheme(8), **fields), tmp_path / "out")
    assert not any("zero_point" in n for n in load_file(folder / "model.safetensors"))


def test_inputs_coded_per_token_differ_by_the_step_their_library_takes(
    source: Path, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_their_step(x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True) / 127.5
        return (x / scale).clamp(-128, 127).round() * scale

    state = state_of(checkpoint, Scheme(8), activations="token")
    found = theirs(written(checkpoint, state, tmp_path / "out"))
    monkeypatch.setattr("optimizer.compress.simulate.fake_quantize_per_token", with_their_step)
    torch.testing.assert_close(logits(found), logits(ours(source, state)), rtol=1e-4, atol=1e-4)


def test_layers_may_be_coded_in_ways_of_their_own(
    source: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    weights = {
        n: rounded(checkpoint.tensors[n], Scheme(8) if "down_proj" in n else W4)
        for n in linears(checkpoint)
        if "o_proj" not in n
    }
    state = CompressedState(weights)
    folder = written(checkpoint, state, tmp_path / "out")
    config = read_json(folder / "config.json")["quantization_config"]
    assert len(config["config_groups"]) == 2
    assert {n for n in config["ignore"] if "o_proj" in n}
    torch.testing.assert_close(logits(theirs(folder)), logits(ours(source, state)))


def test_modules_with_float_inputs_stand_beside_those_with_coded_ones(
    source: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    only = "model.layers.0.mlp.down_proj"
    state = state_of(
        checkpoint,
        Scheme(8),
        activations="tensor",
        ranges=ranges(checkpoint, Range.symmetric(4.0)),
        notes=(Note(only, "weight-only", "its input has outliers"),),
    )
    q = rounded(checkpoint.tensors[f"{only}.weight"], W4)
    state = dataclasses.replace(state, weights={**state.weights, f"{only}.weight": q})
    folder = written(checkpoint, state, tmp_path / "out")
    config = read_json(folder / "config.json")["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert torch.equal(decompressed(folder, only), q.dequantize())
    torch.testing.assert_close(
        logits(theirs(folder)), logits(ours(source, state)), rtol=1e-4, atol=1e-4
    )


def test_a_coded_head_is_untied_from_the_embedding(
    source: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    state = state_of(checkpoint, W4)
    head = rounded(checkpoint.tensors[EMBEDDING], Scheme(8))
    state = dataclasses.replace(state, weights={**state.weights, "lm_head.weight": head})
    folder = written(checkpoint, state, tmp_path / "out")
    assert read_json(folder / "config.json")["tie_word_embeddings"] is False
    found = theirs(folder)
    torch.testing.assert_close(logits(found), logits(ours(source, state, untied=True)))
    assert torch.equal(found.get_input_embeddings().weight, checkpoint.tensors[EMBEDDING])


def test_a_coded_embedding_is_written_as_the_floats_it_stands_for(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    table = rounded(checkpoint.tensors[EMBEDDING], Scheme(8))
    state = state_of(checkpoint, W4)
    state = dataclasses.replace(state, weights={**state.weights, EMBEDDING: table})
    found = theirs(written(checkpoint, state, tmp_path / "out"))
    assert torch.equal(found.get_input_embeddings().weight, table.dequantize())
    assert torch.equal(found.lm_head.weight, checkpoint.tensors[EMBEDDING])


def test_replaced_values_are_the_float_parameters(checkpoint: Checkpoint, tmp_path: Path) -> None:
    norm = torch.linspace(0.5, 2, 64)
    head = checkpoint.tensors[EMBEDDING] * 2
    replaced = {"model.norm.weight": norm, "lm_head.weight": head}
    found = theirs(
        written(checkpoint, state_of(checkpoint, W4, replaced=replaced), tmp_path / "out")
    )
    assert torch.equal(found.model.norm.weight, norm)
    assert torch.equal(found.lm_head.weight, head)
    assert torch.equal(found.get_input_embeddings().weight, checkpoint.tensors[EMBEDDING])


def test_nine_groups_a_row_and_odd_numbers_of_rows(tmp_path: Path) -> None:
    rows = {"a": 9, "b": 16, "c": 21}  # with 8 or fewer their reader cannot view its one word
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "none"}))
    save_file(
        {f"{n}.weight": heavy_tailed((out, 9 * 64), out) for n, out in rows.items()},
        folder / "model.safetensors",
    )
    checkpoint = open_checkpoint(tmp_path)
    scheme = Scheme(4, False, "group", 64)
    state = CompressedState({n: rounded(checkpoint.tensors[n], scheme) for n in checkpoint.tensors})
    out = written(checkpoint, state, tmp_path / "out")
    for n in rows:
        assert torch.equal(decompressed(out, n), state.weights[f"{n}.weight"].dequantize())


def test_vllms_names_types_and_shapes(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = written(checkpoint, state_of(checkpoint, W4_ASYMMETRIC), tmp_path / "out", "bf16")
    tensors = load_file(folder / "model.safetensors")
    found = {
        n.removeprefix("model.layers.0.mlp.up_proj."): (t.dtype, tuple(t.shape))
        for n, t in tensors.items()
        if n.startswith("model.layers.0.mlp.up_proj.")
    }
    assert found == {
        "weight_packed": (torch.int32, (128, 8)),
        "weight_scale": (torch.bfloat16, (128, 4)),
        "weight_shape": (torch.int64, (2,)),
        "weight_zero_point": (torch.int32, (16, 4)),
    }
    config = read_json(folder / "config.json")
    assert config["torch_dtype"] == "bfloat16"
    assert config["quantization_config"] == {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "ignore": ["lm_head", "model.embed_tokens"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": False,
                    "strategy": "group",
                    "group_size": 16,
                    "dynamic": False,
                },
                "input_activations": None,
                "output_activations": None,
            }
        },
    }


def test_the_checkpoints_other_files_go_along(checkpoint: Checkpoint, tmp_path: Path) -> None:
    folder = written(checkpoint, state_of(checkpoint, W4), tmp_path / "out")
    kept = {f.name for f in checkpoint.folder.iterdir()}
    assert {f.name for f in folder.iterdir()} == kept
    for name in kept - {"config.json", "model.safetensors"}:
        assert (folder / name).read_bytes() == (checkpoint.folder / name).read_bytes()


def test_large_folders_are_cut_into_shards(
    source: Path, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compressed_tensors, "SHARD", 15_000)
    state = state_of(checkpoint, W4)
    folder = written(checkpoint, state, tmp_path / "out")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    index = read_json(folder / "model.safetensors.index.json")
    held = [n for f in shards for n in read_header(f)]
    assert sorted(held) == sorted(index["weight_map"])
    sizes = [[e.end - e.begin for e in read_header(f).values()] for f in shards]
    assert sum(map(sum, sizes)) == index["metadata"]["total_size"]
    assert all(sum(s) <= 15_000 for s in sizes[1:])  # the embedding alone is larger
    torch.testing.assert_close(logits(theirs(folder)), logits(ours(source, state)))
    compressed_tensors_folder.verify(folder, checkpoint, state, "fp32")


def test_the_header_says_pt_as_older_transformers_want(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = written(checkpoint, state_of(checkpoint, W4), tmp_path / "out")
    with safe_open(folder / "model.safetensors", "pt") as f:
        assert f.metadata() == {"format": "pt"}


def test_the_bytes_do_not_depend_on_the_order_of_the_state(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    state = state_of(checkpoint, W4)
    turned = dataclasses.replace(state, weights=dict(reversed(state.weights.items())))
    one, two = (written(checkpoint, s, tmp_path / n) for s, n in ((state, "1"), (turned, "2")))
    for file in one.iterdir():
        assert file.read_bytes() == (two / file.name).read_bytes()


def test_a_scale_that_bfloat16_does_not_hold_is_declared(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    name = linears(checkpoint)[0]
    scheme = Scheme(4, True, "group", 32)
    scale = absmax_scale(checkpoint.tensors[name], scheme)[0]
    fine = (scale * 1.01).half().float()
    q = quantize(checkpoint.tensors[name], fine, None, scheme)
    state = CompressedState({name: q})
    for float_type, exact in (("fp32", True), ("fp16", True), ("bf16", False)):
        (tmp_path / float_type).mkdir()
        document = compressed_tensors.write(
            checkpoint,
            state,
            tmp_path / float_type,
            float_type,  # type: ignore[arg-type]
        )
        assert document["exact"] is exact
        assert (document["error"] > 0) is not exact
        assert document["error"] <= 2**-8
        compressed_tensors_folder.verify(tmp_path / float_type, checkpoint, state, float_type)  # type: ignore[arg-type]


def test_run_time_factors_are_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    factors = {"model.layers.0.mlp.up_proj:input": torch.ones(64)}
    with pytest.raises(RecipeError, match=r"multiply at run time.*fold_only: true"):
        written(checkpoint, state_of(checkpoint, Scheme(8), factors=factors), tmp_path / "out")


@pytest.mark.parametrize("scheme", [W4, Scheme(8, False), Scheme(8, True, "group", 32)])
def test_coded_inputs_want_plain_weights(
    checkpoint: Checkpoint, tmp_path: Path, scheme: Scheme
) -> None:
    with pytest.raises(RecipeError, match=r"quantized inputs.*bits: 8, symmetric: true"):
        written(checkpoint, state_of(checkpoint, scheme, activations="token"), tmp_path / "out")


def test_a_conv1d_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    gpt2 = Checkpoint(checkpoint.folder, {"model_type": "gpt2"}, checkpoint.tensors)
    state = CompressedState({"transformer.h.0.mlp.c_fc.weight": rounded(torch.ones(8, 8), W8)})
    with pytest.raises(RecipeError, match="Conv1D"):
        written(gpt2, state, tmp_path / "out")


def test_a_state_of_another_checkpoint_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    state = CompressedState({"other.weight": rounded(torch.ones(8, 8), W8)})
    with pytest.raises(OptimizeError, match=r"other\.weight"):
        written(checkpoint, state, tmp_path / "out")


def test_a_value_that_does_not_fit_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    replaced = {"model.norm.weight": torch.full((64,), 1e6)}
    with pytest.raises(OptimizeError, match=r"model\.norm\.weight.*float16"):
        written(checkpoint, state_of(checkpoint, W4, replaced=replaced), tmp_path / "out", "fp16")


def run_stage(source: Path, state: CompressedState, tmp_path: Path) -> Path:
    for name in ("state", "out"):
        (tmp_path / name).mkdir()
    compressed_state.write(state, tmp_path / "state")
    (source / "contract.json").write_text(json.dumps(small_model.contract("text-generation")))
    target = CompressedTensorsTarget(runtime="compressed-tensors", float="fp32")
    lower.STAGE.run(target, source, tmp_path / "state", source, out=tmp_path / "out")
    return tmp_path / "out"


def test_the_stage_writes_a_folder_and_what_became_of_each_module(
    source: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    state = state_of(checkpoint, W4_ASYMMETRIC)
    out = run_stage(source, state, tmp_path)
    document = json.loads((out / "lowering.json").read_text())
    assert document["exact"] is True
    assert document["modules"]["model.layers.0.mlp.up_proj"] == {
        "weight": "int4 group 16 asymmetric",
        "activation": None,
    }
    assert document["float"] == ["lm_head", "model.embed_tokens"]
    assert "dequantize=True" in document["notes"][0]
    assert (out / "model" / "model.safetensors").is_file()
    assert [n for n in document["notes"] if "no kernel is known for groups of 16" in n]
    assert "vllm serve FOLDER " in (out / "model" / "SERVING.md").read_text()


def test_a_folder_that_lost_a_weight_is_refused(
    source: Path, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = packing.pack32
    monkeypatch.setattr(packing, "pack32", lambda codes, bits: real(codes[:, ::-1].copy(), bits))
    with pytest.raises(LedgerError, match=r"model\.layers\.0\..*reads back"):
        run_stage(source, state_of(checkpoint, W4), tmp_path)


@pytest.mark.parametrize("fault", ["scale", "zero", "range", "float"])
def test_each_kind_of_damage_is_found(checkpoint: Checkpoint, tmp_path: Path, fault: str) -> None:
    coded = fault == "range"
    fields: dict[str, Any] = (
        {"activations": "tensor", "ranges": ranges(checkpoint, Range(-3.0, 5.0))} if coded else {}
    )
    state = state_of(checkpoint, W8 if coded else W4_ASYMMETRIC, **fields)
    folder = written(checkpoint, state, tmp_path / "out")
    compressed_tensors_folder.verify(folder, checkpoint, state, "fp32")
    site, name = "model.layers.1.mlp.up_proj:input", "model.layers.1.mlp.up_proj.weight"
    q = state.weights[name]
    if fault == "range":
        state = dataclasses.replace(state, ranges={**state.ranges, site: Range(-3.0, 6.0)})
    elif fault == "float":
        state = dataclasses.replace(state, replaced={"model.norm.weight": torch.ones(64)})
    else:
        assert q.zero_point is not None
        other = (
            dataclasses.replace(q, scale=q.scale.flip(0))
            if fault == "scale"
            else QTensor(q.integers, q.scale, q.zero_point.flip(0), q.scheme)
        )
        state = dataclasses.replace(state, weights={**state.weights, name: other})
    with pytest.raises(LedgerError, match=r"norm|up_proj"):
        compressed_tensors_folder.verify(folder, checkpoint, state, "fp32")


def test_an_estimate_grows_with_the_model() -> None:
    section = CompressedTensorsTarget(runtime="compressed-tensors")
    small, large = ({f"{i}": (1000, 1000) for i in range(n)} for n in (1, 10))
    low, high = (lower.estimate(section, s) for s in (small, large))
    assert high.disk == 10 * low.disk
    assert high.memory == low.memory
