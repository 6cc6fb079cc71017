"""Fixtures: a bundle to publish, built once per session.

A bundle has 217 sources of the harness, each of them one file to send and to fetch. A test that
runs none of them takes the bundle with few of them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.package.bundles import small_bundle


@pytest.fixture(scope="session")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output folder of the package stage, read-only."""
    return small_bundle.make(tmp_path_factory.mktemp("packaged"))


@pytest.fixture(scope="session")
def lean(packaged: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bundle with few sources of the harness, read-only."""
    return small_bundle.lean(packaged / "bundle", tmp_path_factory.mktemp("lean") / "bundle")


@pytest.fixture
def bundle(lean: Path, tmp_path: Path) -> Path:
    """Return a copy, with few sources of the harness, that a test may change."""
    return Path(shutil.copytree(lean, tmp_path / "bundle"))


@pytest.fixture
def whole_bundle(packaged: Path, tmp_path: Path) -> Path:
    """Return a copy of the bundle, which runs, that a test may change."""
    return Path(shutil.copytree(packaged / "bundle", tmp_path / "bundle"))
