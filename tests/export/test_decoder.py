from __future__ import annotations

from pathlib import Path

import pytest

from tests.decoders import write_tiny_decoder
from tests.export.folders import exported, loaded_decoder


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3", "gpt2", "opt"])
def test_every_family_exports(tmp_path: Path, kind: str) -> None:
    source = loaded_decoder(write_tiny_decoder(tmp_path / "model", kind), tmp_path / "load")
    made = exported(source, tmp_path / "export")
    assert "lm_head" in made.names.modules
