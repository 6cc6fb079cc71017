"""A decoder that caps its scores, as torch's attention does not, and scales its embedding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from optimizer.compress.data import own_text
from optimizer.compress.walk.capture import capture
from optimizer.compress.walk.model_source import open_source
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model, materialize
from tests.compress.decoders import TASK, loaded
from tests.decoders import write_tiny_decoder

IDS = torch.arange(5, 45).reshape(2, 20)
BATCH = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}


@pytest.fixture(scope="module")
def gemma2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gemma2")
    return loaded(write_tiny_decoder(root / "model", "gemma2"), root / "load")


def test_it_is_opened_with_its_own_attention(gemma2: Path) -> None:
    assert open_source(TASK, gemma2).model.config._attn_implementation == "eager"  # type: ignore[union-attr]


def test_its_blocks_one_by_one_are_the_whole_model(gemma2: Path) -> None:
    source = open_source(TASK, gemma2)
    stream = capture(source, source.blocks, [BATCH])
    materialize(source.model, "", source.tensors)
    hidden = stream.hidden[0]
    with torch.no_grad():
        for use in stream.uses[0]:
            hidden = use.apply(source.model, hidden)
        last = source.model.get_submodule(source.final_norm)(hidden)
        whole = load_torch_model(open_checkpoint(gemma2), TASK).model(**BATCH).last_hidden_state
    assert torch.equal(last, whole)


def test_its_embedding_is_left_as_it_was(gemma2: Path) -> None:
    source = open_source(TASK, gemma2)
    capture(source, source.blocks, [BATCH])
    embedding = source.model.get_submodule(source.embedding)
    assert embedding.weight is source.model.get_submodule("lm_head").weight
    assert embedding.weight.is_meta
    assert embedding.padding_idx == 0


def test_it_writes_text_with_its_own_attention(
    gemma2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(own_text.one_query, "attention", None)
    model = load_torch_model(open_checkpoint(gemma2), TASK)
    assert own_text.generate(model, IDS, 2, seed=0).shape == (2, 20)
