from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.export.folders import Exported, exported, loaded
from tests.lower.decoder_graphs import Decoder, decoder


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
def minilm(minilm_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """The real all-MiniLM-L6-v2, exported in float32."""
    folder = tmp_path_factory.mktemp("minilm")
    return exported(loaded(minilm_source, folder / "load"), folder / "export")


@pytest.fixture(scope="session")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Decoder]:
    """A small decoder of each kind, exported when it is first asked for."""
    return cache(lambda kind: decoder(kind, tmp_path_factory.mktemp("decoder")))
