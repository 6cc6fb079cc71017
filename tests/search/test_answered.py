"""The float model's answers, kept in a file and taken apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimizer.data.image_truth.objects import Labelled
from optimizer.harness.tasks.images.object_detection import Objects
from optimizer.search.stages import answered
from optimizer.search.stages.judging import joined
from optimizer.validate.quality import quality
from optimizer.validate.quality.images import detection, maps
from optimizer.validate.quality.quality import Answers

BOX = np.array([[0.0, 0.0, 4.0, 4.0]])
FOUND = detection.match(
    Objects(np.array([0.9]), np.array([1]), BOX), [Labelled(1, (0.0, 0.0, 4.0, 4.0))]
)
SEEN = [FOUND, maps.Labels(np.array([[1, 2]], np.uint16), np.ones((3, 2))), maps.Depths(0.1, 0.9)]


def texts(scale: float = 1.0) -> tuple[Any, ...]:
    values = np.random.default_rng(0).normal(size=(6, 4)) * np.arange(1, 7)[:, None]
    return tuple(values * scale)


@pytest.mark.parametrize("one", SEEN, ids=lambda one: type(one).__name__)
def test_answers_are_read_as_they_were_written(tmp_path: Path, one: Any) -> None:
    whole = Answers(texts(), texts(2), None, ("a",) * 6, True, (1, 3), (one,) * 6)
    answered.write(whole, tmp_path / "rows.npz")
    again = answered.read(tmp_path / "rows.npz")
    assert repr(again) == repr(whole)


def test_rows_of_answers_keep_how_they_are_compared() -> None:
    """Vectors compared by their product, and several arrays per row."""
    whole = Answers(texts(), texts(2)[::-1], None, None, True, (1, 3), (FOUND,) * 6)
    parts = joined([whole.of_rows([0, 1]), whole.of_rows(range(2, 6))])
    assert repr(parts) == repr(whole)
    assert (quality.find_nearest(parts) == quality.find_nearest(whole)).all()
