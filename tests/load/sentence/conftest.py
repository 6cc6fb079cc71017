"""Folders saved by sentence-transformers, of one tiny random encoder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Save = Callable[..., Path]


@pytest.fixture(scope="session")
def encoder(tiny_bert: Path) -> Any:
    """The library's Transformer module of the tiny encoder, on texts of up to 24 tokens."""
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    return modules.Transformer(str(tiny_bert), max_seq_length=24)


@pytest.fixture
def save(encoder: Any, tmp_path: Path) -> Save:
    """save(*modules after the Transformer, **settings) -> folder. A module may be a name."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    def run(pooling: Any = "mean", *modules: Any, include_prompt: bool = True, **more: Any) -> Path:
        pool = Pooling(64, pooling_mode=pooling, include_prompt=include_prompt)
        model = SentenceTransformer(modules=[encoder, pool, *modules], device="cpu", **more)
        model.save(str(tmp_path / "saved"), create_model_card=False)
        return tmp_path / "saved"

    return run
