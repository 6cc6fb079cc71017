"""A config in llama.cpp's keys, and refusals of values that llama.cpp computes differently."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from optimizer.checks import accepted, target_models
from optimizer.checks.context import Context
from optimizer.foundation.errors import RecipeError
from optimizer.lower.gguf import architectures
from optimizer.lower.gguf.tensors import order_rows
from optimizer.model.architectures.families import FAMILIES
from optimizer.recipe import file as recipe_file
from tests.decoders import write_tiny_decoder

RECIPE = """
name: probe
model: {{source: {source}, task: text-generation}}
quantize:
  weights: {weights}
targets:
  - {{runtime: gguf}}
validate: {{data: {{source: text, files: [b.txt]}}, metric: perplexity}}
"""


def config(kind: str, **fields: Any) -> dict[str, Any]:
    document: dict[str, Any] = transformers.AutoConfig.for_model(kind, **fields).to_dict()
    return document


@pytest.mark.parametrize("kind", architectures.ARCHITECTURES)
def test_every_architecture_is_loaded_here_and_read_by_transformers(kind: str) -> None:
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    assert kind in FAMILIES
    assert architectures.find_architecture(config(kind)).name in GGUF_SUPPORTED_ARCHITECTURES


def test_the_keys_of_a_llama() -> None:
    rope = {"rope_theta": 5e5, "rope_type": "default"}
    keys = architectures.build_metadata(
        config("llama", num_key_value_heads=8, rope_parameters=rope)
    )
    assert keys["llama.attention.head_count"] == 32
    assert keys["llama.attention.head_count_kv"] == 8
    assert keys["llama.rope.freq_base"] == 5e5
    assert keys["llama.rope.dimension_count"] == keys["llama.attention.key_length"] == 128


def test_what_a_gpt2_leaves_out_is_written() -> None:
    assert architectures.build_metadata(config("gpt2"))["gpt2.feed_forward_length"] == 4 * 768


@pytest.mark.parametrize(
    ("kind", "fields", "problem"),
    [
        ("opt", {}, "Accepted: llama, mistral, qwen2, qwen3, gpt2"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act: gelu"),
        ("qwen3", {"attention_bias": True}, "attention_bias: True"),
        ("gpt2", {"activation_function": "relu"}, "activation_function: relu"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx: True"),
        (
            "llama",
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}},
            "rope_type: linear",
        ),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(
    kind: str, fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(RecipeError, match=re.escape(problem)):
        architectures.find_architecture(config(kind, **fields))


def test_a_sliding_window_is_the_context_and_is_said() -> None:
    mistral = config("mistral", sliding_window=4096, max_position_embeddings=32768)
    assert architectures.build_metadata(mistral)["llama.context_length"] == 4096
    assert "window of 4096 tokens" in next(architectures.write_notes(mistral))
    unused = config("qwen2", use_sliding_window=False, max_position_embeddings=32768)
    assert architectures.build_metadata(unused)["qwen2.context_length"] == 32768
    assert list(architectures.write_notes(unused)) == []


def test_rows_that_rotate_together_lie_side_by_side() -> None:
    assert order_rows(8, 2).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert order_rows(4, 0).tolist() == [0, 1, 2, 3]


def probe(tmp_path: Path, source: str = "somewhere", weights: str = "{bits: 4}") -> Any:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(source=source, weights=weights))
    recipe = recipe_file.read(path)
    accepted.check(recipe, Context())
    return recipe


def test_zero_points_in_8_bits_are_refused(tmp_path: Path) -> None:
    probe(tmp_path, weights="{bits: 4, granularity: group, group_size: 32, symmetric: false}")
    with pytest.raises(RecipeError, match=r"quantize\.weights\.symmetric: false with bits: 8"):
        probe(tmp_path, weights="{bits: 8, symmetric: false}")


def test_groups_that_are_not_whole_blocks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"Accepted: 32, 64, 128, 256"):
        probe(tmp_path, weights="{bits: 4, granularity: group, group_size: 16}")


def test_quantized_activations_are_refused_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    text = RECIPE.format(source="somewhere", weights="{bits: 8}")
    path.write_text(text.replace("targets:", "  activations: {granularity: token}\ntargets:"))
    with pytest.raises(RecipeError, match=r"rounds the inputs.*remove the block") as caught:
        accepted.check(recipe_file.read(path), Context())
    assert "device: cpu" not in str(caught.value)


def test_a_task_without_a_language_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    text = RECIPE.format(source="somewhere", weights="{bits: 8}")
    path.write_text(
        text.replace("text-generation", "sentence-embedding").replace("perplexity", "cosine")
    )
    with pytest.raises(RecipeError, match=r"model\.task: sentence-embedding.*text-generation"):
        accepted.check(recipe_file.read(path), Context())


def test_a_model_that_gguf_does_not_hold_is_refused_from_its_config(tmp_path: Path) -> None:
    good, bad = (write_tiny_decoder(tmp_path / kind, kind) for kind in ("qwen2", "opt"))
    target_models.check(probe(tmp_path, str(good)), Context())
    with pytest.raises(RecipeError, match=r"architecture 'opt'"):
        target_models.check(probe(tmp_path, str(bad)), Context())


def test_widths_that_are_not_whole_blocks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"intermediate_size is 100.*multiples of 32"):
        architectures.check(config("llama", intermediate_size=100), "targets.0")
