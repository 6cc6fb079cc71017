"""Fixtures: a bundle to publish, built once per session.

A bundle has 217 sources of the harness, each of them one file to send and to fetch. A test that
runs none of them takes the bundle with those of `STAYING` alone.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from optimizer.package import manifest
from tests.package.bundles import small_bundle

STAYING = ("__init__.py", "__main__.py")  # one or two of each folder


@pytest.fixture(scope="session")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output folder of the package stage, read-only."""
    return small_bundle.make(tmp_path_factory.mktemp("packaged"))


@pytest.fixture(scope="session")
def lean(packaged: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the bundle with few sources of the harness, read-only."""
    folder = Path(shutil.copytree(packaged / "bundle", tmp_path_factory.mktemp("lean") / "bundle"))
    for source in (folder / "harness").rglob("*.py"):
        if source.name not in STAYING:
            source.unlink()
    manifest.write(folder, json.loads((folder / "manifest.json").read_bytes()))
    return folder


@pytest.fixture
def bundle(lean: Path, tmp_path: Path) -> Path:
    """Return a copy, with few sources of the harness, that a test may change."""
    return Path(shutil.copytree(lean, tmp_path / "bundle"))


@pytest.fixture
def whole_bundle(packaged: Path, tmp_path: Path) -> Path:
    """Return a copy of the bundle, which runs, that a test may change."""
    return Path(shutil.copytree(packaged / "bundle", tmp_path / "bundle"))
