from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.conftest import heavy_tailed, write_tokenizer
from tests.export.folders import Exported, exported, loaded
from tests.lower.decoder_graphs import Decoder, decoder
from tests.minilm import shortened


@pytest.fixture(scope="session")
def tiny(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """The tiny encoder, exported in float32."""
    folder = tmp_path_factory.mktemp("lowered")
    return exported(loaded(tiny_bert, folder / "load"), folder / "export")


@pytest.fixture(scope="session")
def tiny16(tiny: Exported, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """The same in half precision."""
    out = tmp_path_factory.mktemp("lowered16") / "export"
    return exported(tiny.source, out, precision="fp16")


@pytest.fixture(scope="session")
def albert(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """A random ALBERT: two layers, one set of weights."""
    from transformers import AlbertConfig, AlbertModel

    folder = tmp_path_factory.mktemp("albert")
    (folder / "model").mkdir()
    config = AlbertConfig(
        vocab_size=write_tokenizer(folder / "model"),
        embedding_size=32,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
    )
    model = AlbertModel(config)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(heavy_tailed(tuple(parameter.shape), i, 0.08))
    model.save_pretrained(folder / "model")
    return exported(loaded(folder / "model", folder / "load"), folder / "export")


@pytest.fixture(scope="session")
def minilm(minilm_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """The first blocks of the real all-MiniLM-L6-v2, exported in float32."""
    folder = tmp_path_factory.mktemp("minilm")
    model = shortened(folder / "model", minilm_source)
    return exported(loaded(model, folder / "load"), folder / "export")


@pytest.fixture(scope="session")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Decoder]:
    """A small decoder of each kind, exported when it is first asked for."""
    return cache(lambda kind: decoder(kind, tmp_path_factory.mktemp("decoder")))
