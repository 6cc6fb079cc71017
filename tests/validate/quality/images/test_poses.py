"""Average precision of poses is that of pycocotools; keypoints that are near are counted."""

from __future__ import annotations

import contextlib
import io

import numpy as np
import pytest

from optimizer.data.image_truth.poses import Pose
from optimizer.foundation.errors import DataError
from optimizer.validate.quality.images import detection, poses

Array = np.ndarray
Image = tuple[Array, Array, list[Pose]]  # places and scores of the poses that are read; the truth


def images(count: int = 14) -> list[Image]:
    """Images with persons, some without labelled keypoints or in a crowd, and noisy answers."""
    rng = np.random.default_rng(0)
    made = []
    for _ in range(count):
        truth, places = [], []
        for _ in range(int(rng.integers(1, 5))):
            left, top = rng.uniform(0, 200, 2)
            width, height = rng.uniform(20, 120, 2)
            right = rng.uniform((left, top), (left + width, top + height), (17, 2))
            known = (rng.random(17) < 0.7) * (rng.random() < 0.8) * 2
            triples = tuple((x, y, float(v)) for (x, y), v in zip(right, known, strict=True))
            area = width * height * rng.uniform(0.3, 0.9)
            box = (left, top, width, height)
            truth.append(Pose(box, triples, area, crowd=rng.random() < 0.15))
            if truth[-1].read:
                spread = rng.choice([1, 4, 12], p=[0.5, 0.3, 0.2])
                places.append(right + rng.normal(0, spread, (17, 2)))
        if places:
            made.append((np.array(places), rng.random((len(places), 17)), truth))
    return made


def by_coco(made: list[Image]) -> float:
    """AP of pycocotools."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    truth, given = [], []
    for i, (places, scores, right) in enumerate(made):
        for one in right:
            each = {"image_id": i, "category_id": 1, "bbox": list(one.box), "area": one.area}
            each |= {"keypoints": [v for t in one.keypoints for v in t], "id": len(truth) + 1}
            truth.append({**each, "iscrowd": int(one.crowd), "num_keypoints": one.labelled})
        for pose, score in zip(places, scores, strict=True):
            flat = [v for x, y in pose for v in (x, y, 1)]
            each = {"image_id": i, "category_id": 1, "score": float(score.mean())}
            given.append({**each, "keypoints": flat})
    with contextlib.redirect_stdout(io.StringIO()):
        data = COCO()
        shown = [{"id": i} for i in range(len(made))]
        data.dataset = {"images": shown, "annotations": truth, "categories": [{"id": 1}]}
        data.createIndex()
        judge = COCOeval(data, data.loadRes(given), "keypoints")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    return float(judge.stats[0])


def test_the_precision_of_poses_is_that_of_pycocotools() -> None:
    made = images()
    kinds = [pose for *_, truth in made for pose in truth]
    assert any(p.crowd for p in kinds)
    assert any(not p.crowd and not p.labelled for p in kinds)
    matched = [poses.match(*one) for one in made]
    value = detection.precision(matched, len(detection.IOUS))(np.ones((1, len(made))))[0]
    expected = by_coco(made)
    assert 0.1 < expected < 0.9
    assert value == pytest.approx(expected, abs=1e-12)


def test_keypoints_within_a_twentieth_of_the_longer_side_are_near() -> None:
    keypoints = ((10.0, 10.0, 2.0), (50.0, 80.0, 1.0), (5.0, 5.0, 0.0))
    truth = [Pose((0.0, 0.0, 60.0, 100.0), keypoints, 6000.0)]
    places = np.array([[[13.0, 13.9], [50.0, 85.1], [5.0, 5.0]]])
    found = poses.match(places, np.ones((1, 3)), truth)
    assert found.near.tolist() == [1, 2]
    with pytest.raises(DataError, match="17 keypoints"):
        poses.average_precision([found], [found], 0.95)
