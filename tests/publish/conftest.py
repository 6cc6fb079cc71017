"""Fixtures: a bundle to publish, built once per session."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.package.bundles import small_bundle


@pytest.fixture(scope="session")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output folder of the package stage, read-only."""
    return small_bundle.make(tmp_path_factory.mktemp("packaged"))


@pytest.fixture
def bundle(packaged: Path, tmp_path: Path) -> Path:
    """Return a copy of the bundle that a test may change."""
    return Path(shutil.copytree(packaged / "bundle", tmp_path / "bundle"))
