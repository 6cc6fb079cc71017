"""A decoder that caps its scores, which torch's own attention does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from optimizer.compress.data import own_text
from optimizer.compress.walk.model_source import open_source
from optimizer.load.checkpoint import open_checkpoint
from optimizer.load.model import torch_model
from tests.compress.decoders import TASK, loaded
from tests.decoders import write_tiny_decoder

IDS = torch.arange(5, 45).reshape(2, 20)


@pytest.fixture(scope="module")
def gemma2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gemma2")
    return loaded(write_tiny_decoder(root / "model", "gemma2"), root / "load")


def test_it_is_opened_with_its_own_attention(gemma2: Path) -> None:
    assert open_source(TASK, gemma2).model.config._attn_implementation == "eager"  # type: ignore[union-attr]


def test_it_writes_text_with_its_own_attention(
    gemma2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_text.one_query, "attention", None)
    model = torch_model(open_checkpoint(gemma2), TASK)
    assert own_text.continued(model, IDS, 2, seed=0).shape == (2, 20)
