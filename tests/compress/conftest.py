"""Loaded checkpoints that the tests of compress share; read-only."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compress import checkpoints, decoders


@pytest.fixture(scope="session")
def loaded(tiny_bert: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The load stage's folder of the tiny encoder."""
    return checkpoints.load(tiny_bert, tmp_path_factory.mktemp("loaded") / "load")


@pytest.fixture(scope="session")
def loaded_classifier(tiny_classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loaded_classifier") / "load"
    return checkpoints.load(tiny_classifier, folder, "text-classification")


@pytest.fixture(scope="session")
def loaded_albert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("albert")
    return checkpoints.load(checkpoints.write_albert(folder / "model"), folder / "load")


@pytest.fixture(scope="session")
def static(loaded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state with static activations, smoothing folded and as factors, and corrected biases."""
    return checkpoints.compress(
        loaded,
        tmp_path_factory.mktemp("static") / "out",
        method="smoothquant",
        bias_correction=True,
        **checkpoints.W8A8,
    )


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Path:
    return decoders.loaded(tiny_llama, tmp_path_factory.mktemp("llama") / "load")
