"""Rotations leave the function as it is, and are refused where they would not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from optimizer.foundation import state as states
from optimizer.foundation.errors import RecipeError
from tests.compress.checkpoints import load
from tests.compress.decoders import TASK, compress, error
from tests.decoders import write_tiny_decoder


def test_a_rotated_model_is_the_model(llama: Path, tmp_path: Path) -> None:
    state = compress(llama, tmp_path / "out", methods=["rotation"])
    assert error(llama, states.CompressedState({}, state.replaced)) < 1e-4
    assert torch.equal(
        state.replaced["model.norm.weight"], torch.ones_like(state.replaced["model.norm.weight"])
    )


def test_a_layer_norm_is_not_rotated_through(tmp_path: Path) -> None:
    source = load(write_tiny_decoder(tmp_path / "opt", "opt"), tmp_path / "load", TASK)
    with pytest.raises(RecipeError, match="LayerNorm"):
        compress(source, tmp_path / "out", methods=["rotation"])
