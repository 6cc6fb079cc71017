"""Checkpoints whose names or tensors transformers changes while loading them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersForImageClassification,
    EsmConfig,
    EsmModel,
)

from optimizer.foundation.errors import CheckpointError
from optimizer.load import weights
from optimizer.model.checkpoint.model import build_skeleton_from_config
from optimizer.recipe.schema import Model, Task

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
}
ROTARY = "rotary_embeddings.inv_freq"
OF_BLOCK = "encoder.layer.{}.attention.self." + ROTARY


def matched(folder: Path, task: Task) -> weights.SourceWeights:
    section = Model(source=str(folder), task=task)
    model = build_skeleton_from_config(AutoConfig.from_pretrained(folder), task)
    return weights.match(weights.find(folder, section), model, section)


@pytest.fixture
def esm(tmp_path: Path) -> Path:
    config = EsmConfig(
        **SIZES, vocab_size=40, pad_token_id=0, mask_token_id=1, position_embedding_type="rotary"
    )
    EsmModel(config).save_pretrained(tmp_path)
    return tmp_path


def store_rotary_by_block(folder: Path) -> None:
    """The frequencies once per block, as transformers 4 stored them."""
    tensors = load_file(folder / "model.safetensors")
    (old,) = [n for n in tensors if n.endswith(ROTARY)]
    frequencies = tensors.pop(old)
    tensors |= {OF_BLOCK.format(i): frequencies.clone() for i in range(2)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_a_tensor_that_transformers_renames_is_read_by_its_name_in_the_file(esm: Path) -> None:
    assert matched(esm, "sentence-embedding").source_names[ROTARY].endswith(ROTARY)


def test_one_that_every_block_repeats_is_no_block_too_many(esm: Path) -> None:
    store_rotary_by_block(esm)
    found = matched(esm, "sentence-embedding")
    assert found.source_names[ROTARY] == OF_BLOCK.format(0)
    assert OF_BLOCK.format(1) not in found.unused


@pytest.fixture
def swiglu() -> torch.nn.Module:
    """Its gate and up projections lie in one tensor of a checkpoint."""
    config = Dinov2WithRegistersConfig(
        **SIZES, image_size=32, patch_size=8, use_swiglu_ffn=True, num_labels=3
    )
    return Dinov2WithRegistersForImageClassification(config)


def test_tensors_that_transformers_splits_are_named_with_what_to_do(
    swiglu: Any, tmp_path: Path
) -> None:
    swiglu.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"computes them from '.*mlp\.weights_in") as caught:
        matched(tmp_path, "image-classification")
    assert "save_original_format=False" in str(caught.value.fix)


def test_what_that_message_says_to_do_helps(swiglu: Any, tmp_path: Path) -> None:
    swiglu.save_pretrained(tmp_path, save_original_format=False)
    assert matched(tmp_path, "image-classification").unused == ()
