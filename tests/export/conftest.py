from __future__ import annotations

from pathlib import Path

import pytest

from tests.export.folders import Exported, exported, loaded


@pytest.fixture(scope="session")
def tiny(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """The tiny encoder, exported in float32."""
    folder = tmp_path_factory.mktemp("exported")
    return exported(loaded(tiny_bert, folder / "load"), folder / "export")
