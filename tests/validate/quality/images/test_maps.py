"""Label maps and depths: scikit-learn gives the same IoU; an alignment changes no depth error."""

from __future__ import annotations

import numpy as np
import pytest

from optimizer.foundation.errors import DataError
from optimizer.validate.quality.images import maps

LABELS = 4


def test_mean_iou_is_that_of_scikit_learn_without_ignored_pixels() -> None:
    from sklearn.metrics import jaccard_score

    rng = np.random.default_rng(0)
    masks = rng.integers(0, LABELS - 1, (3, 20, 30))  # no pixel of the last label
    given = np.where(rng.random(masks.shape) < 0.7, masks, rng.integers(0, LABELS, masks.shape))
    masks[:, :4] = maps.IGNORED
    seen = [
        maps.Labels(g, maps.count_areas(g, m, LABELS, "mask"))
        for g, m in zip(given, masks, strict=True)
    ]
    value = maps.mean_iou(seen, seen).baseline(np.ones((1, 3)))[0]
    kept = masks != maps.IGNORED
    assert value == pytest.approx(jaccard_score(masks[kept], given[kept], average="macro"))


def test_a_value_without_a_label_is_refused() -> None:
    ids = np.zeros((2, 2), int)
    with pytest.raises(DataError, match="the value 4, and the model has 4 labels"):
        maps.count_areas(ids, np.array([[0, 4], [1, 2]]), LABELS, "mask.png")


def test_depths_are_aligned_and_unknown_ones_left_out() -> None:
    right = np.random.default_rng(0).uniform(1, 9, (10, 12))
    same = maps.compare_depths(3 * right - 5, np.where(right > 8, 0, right), "depth")
    assert (same.relative, same.near) == (pytest.approx(0, abs=1e-12), 1.0)
    noisy = maps.compare_depths(
        right + np.random.default_rng(1).normal(0, 2, right.shape), right, "depth"
    )
    assert noisy.relative is not None
    assert noisy.near is not None
    assert noisy.relative > 0.1
    assert noisy.near < 0.9
