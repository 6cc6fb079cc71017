"""KV caches in FP8, judged by transformers' cache and by the names that vLLM reads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.quantization.lifecycle.initialize import is_cached_attention_module
from safetensors.torch import load_file, save_file

from optimizer.compress.selection import select
from optimizer.compress.walk.model_source import open_source
from optimizer.foundation.errors import LedgerError, RecipeError
from optimizer.foundation.qtensor import Scheme
from optimizer.foundation.rounding import float8
from optimizer.foundation.state import CompressedState, Range
from optimizer.lower.compressed_tensors import folder as written_folder
from optimizer.lower.compressed_tensors.serving_engines import ENGINES, write_notes
from optimizer.model.checkpoint.checkpoint import Checkpoint, read_json
from optimizer.recipe.schema import Quantize
from tests.decoders import write_tiny_decoder
from tests.lower.compressed_tensors.test_tensors import (
    IDS,
    checkpoint,
    logits,
    ours,
    source,
    state_of,
    theirs,
    written,
)

__all__ = ["checkpoint", "source"]

SITES = [f"model.layers.{i}.self_attn.kv_cache.{of}" for i in range(2) for of in ("key", "value")]
VLLM_SCALE = r"model\.layers\.\d\.self_attn\.([kv])_scale$"  # weight_utils.py of vLLM 0.33


@pytest.fixture(scope="module")
def state(checkpoint: Checkpoint) -> CompressedState:
    """Scales of keys and values of two layers, all different."""
    each = {f"{site}:input": Range.symmetric(1.0 + i) for i, site in enumerate(SITES)}
    return state_of(checkpoint, Scheme(8, type="float8"), ranges=each)


def prefilled(model: Any) -> tuple[torch.Tensor, Any]:
    """Logits of the last half of IDS, computed on a cache of the first half; and the cache."""
    half = IDS.shape[1] // 2
    with torch.no_grad():
        cache = model(input_ids=IDS[:, :half], use_cache=True).past_key_values
        out = model(input_ids=IDS[:, half:], past_key_values=cache, use_cache=True)
    return out.logits, out.past_key_values


def test_transformers_holds_and_reads_the_cache_that_the_state_says(
    source: Path, checkpoint: Checkpoint, state: CompressedState, tmp_path: Path
) -> None:
    out = written(checkpoint, state, tmp_path / "out")
    written_folder.verify(out, checkpoint, state, "fp32")
    model, twin = theirs(out), ours(source, state)
    torch.testing.assert_close(logits(model), logits(twin), rtol=1e-4, atol=1e-4)
    (one, held), (other, simulated) = prefilled(model), prefilled(twin)
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    scales = iter(state.ranges.values())
    for layer, same in zip(held.layers, simulated.layers, strict=True):
        for x, y in ((layer.keys, same.keys), (layer.values, same.values)):
            scale = next(scales).float8_scale
            assert torch.equal(float8.nearest(x / scale).float() * scale, x)
            assert ((x - y).abs() > 1e-6).sum() <= 2  # a value at a tie
    plain = ours(source, CompressedState(state.weights))
    assert (logits(plain) - logits(twin)).abs().max() > 1e-3


def test_names_and_config_are_those_that_vllm_and_compressed_tensors_read(
    checkpoint: Checkpoint, state: CompressedState, source: Path, tmp_path: Path
) -> None:
    out = written(checkpoint, state, tmp_path / "out", "bf16")
    scales = {n: t for n, t in load_file(out / "model.safetensors").items() if ".self_attn." in n}
    found = [n for n in scales if re.match(VLLM_SCALE, n)]
    assert len(found) == 4
    assert all(scales[n].shape == (1,) for n in found)
    document = read_json(out / "config.json")["quantization_config"]
    scheme = QuantizationConfig.model_validate(document).kv_cache_scheme
    assert (scheme.num_bits, scheme.type, scheme.strategy, scheme.dynamic) == (
        8,
        "float",
        "tensor",
        False,
    )
    names = [n for n, m in ours(source, state).named_modules() if is_cached_attention_module(m)]
    assert names == [n.removesuffix(".kv_cache.key") for n in SITES[::2]]


@pytest.mark.parametrize("fault", ["of another layer", "of the values"])
def test_a_scale_of_another_cache_is_seen(
    fault: str, checkpoint: Checkpoint, state: CompressedState, tmp_path: Path
) -> None:
    out = written(checkpoint, state, tmp_path / "out")
    tensors = load_file(out / "model.safetensors")
    mine = "model.layers.0.self_attn.k_scale"
    other = mine.replace("layers.0", "layers.1") if "layer" in fault else mine.replace("k_", "v_")
    tensors[mine], tensors[other] = tensors[other], tensors[mine]
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    with pytest.raises(LedgerError, match=r"self_attn\.k_scale of the KV cache reads back"):
        written_folder.verify(out, checkpoint, state, "fp32")


def test_the_command_asks_for_the_cache_and_others_are_warned_of() -> None:
    commands, warnings = write_notes([], generates=True, float8_cache=True)
    assert commands[0].endswith("--kv-cache-dtype fp8")
    assert len(warnings) == len(ENGINES) - 1
    assert all("the KV cache" in w for w in warnings)


def test_an_attention_that_cannot_be_calibrated_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_decoder(tmp_path / "checkpoint", "gpt2")
    opened = open_source("text-generation", folder.parent)
    with pytest.raises(RecipeError, match=r"quantize\.kv_cache.*0 attentions of"):
        select(opened, Quantize(kv_cache="float8"))
