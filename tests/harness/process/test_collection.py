"""Garbage is collected before something is timed, and not while libraries are imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from optimizer import checks
from optimizer.foundation.errors import RecipeError
from optimizer.harness.process.collection import delay_collection, pause_collection


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """Generations that were collected, each after ten new objects."""
    generations: list[int] = []

    def note(phase: str, about: dict[str, int]) -> None:
        generations.append(about["generation"])

    before = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(10)
    yield generations
    gc.set_threshold(*before)
    gc.callbacks.remove(note)


def test_nothing_is_collected_until_the_end_of_the_delay(collections: list[int]) -> None:
    with delay_collection():
        collections.clear()
        kept = [[i] for i in range(100)]
        assert not collections
    kept += [[i] for i in range(100)]
    assert collections


def test_a_delay_leaves_collection_off_where_it_was(collections: list[int]) -> None:
    gc.disable()
    try:
        with delay_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_a_pause_begins_with_a_full_collection(collections: list[int]) -> None:
    collections.clear()
    with pause_collection():
        assert 2 in collections  # other threads may cause smaller ones


def test_a_recipe_is_checked_without_collections(collections: list[int], tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("name: [" + "a, " * 50 + "]\n")
    collections.clear()
    with pytest.raises(RecipeError):
        checks.read(tmp_path / "recipe.yaml", (), fetch=False)
    assert len(collections) < 20  # thousands of objects are made
