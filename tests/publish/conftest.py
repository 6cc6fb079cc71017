"""A bundle to publish, made once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.package.bundles import small_bundle


@pytest.fixture(scope="session")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package stage's output folder. Read-only."""
    return small_bundle.make(tmp_path_factory.mktemp("packaged"))


@pytest.fixture
def bundle(packaged: Path, tmp_path: Path) -> Path:
    """A copy of its bundle, to be changed."""
    return Path(shutil.copytree(packaged / "bundle", tmp_path / "bundle"))
