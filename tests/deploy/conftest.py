"""Bundles to deploy, made once, and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from optimizer.cli import main
from tests.package.bundles import generation_bundle, small_bundle


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundle for sentence-embedding. Read-only."""
    return small_bundle.make(tmp_path_factory.mktemp("deployed")) / "bundle"


@pytest.fixture(scope="session")
def decoder_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bundle for text-generation. Read-only."""
    return generation_bundle.make(tmp_path_factory.mktemp("decoders"), "shared")


def run(*words: object) -> Result:
    return CliRunner().invoke(main, ["deploy", *map(str, words)])


def deployed(*words: object) -> dict[str, Any]:
    """Run the command and return its document."""
    result = run(*words, "--json") if "--" not in words else run("--json", *words)
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document
