"""Mean average precision: pycocotools gives the same, also where images are drawn repeatedly."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence

import numpy as np
import pytest

from optimizer.data.image_truth.objects import Labelled
from optimizer.foundation.errors import DataError
from optimizer.harness.tasks.images.object_detection import Objects
from optimizer.validate.quality.images import detection

Image = tuple[Objects, list[Labelled]]


def images(count: int = 12, seed: int = 0) -> list[Image]:
    """Images with right boxes of three labels, some of them crowds, and noisy objects near them."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        truth = []
        for _ in range(int(rng.integers(0, 5))):
            left, top, width, height = (
                rng.uniform(0, 60, 2).tolist() + rng.uniform(5, 40, 2).tolist()
            )
            truth.append(
                Labelled(int(rng.integers(0, 3)), (left, top, width, height), rng.random() < 0.15)
            )
        boxes, labels = [], []
        for one in [*truth, *truth[:2]]:
            left, top, width, height = np.array(one.box) + rng.normal(0, 3, 4)
            boxes.append([left, top, left + abs(width), top + abs(height)])
            labels.append(one.label if rng.random() < 0.8 else int(rng.integers(0, 3)))
        for _ in range(3):
            left, top = rng.uniform(0, 60, 2)
            boxes.append([left, top, left + 20, top + 20])
            labels.append(int(rng.integers(0, 3)))
        scores = rng.choice([0.9, 0.7, 0.5, 0.3, 0.2], len(boxes)) + rng.uniform(
            0, 0.05, len(boxes)
        )
        made.append((Objects(scores, np.array(labels), np.array(boxes)), truth))
    return made


def by_coco(made: Sequence[Image]) -> tuple[float, float]:
    """(AP, AP50) of pycocotools."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    truth, given = [], []
    for i, (objects, right) in enumerate(made):
        for one in right:
            area = one.box[2] * one.box[3]
            each = {"image_id": i, "category_id": one.label, "bbox": list(one.box), "area": area}
            truth.append({**each, "iscrowd": int(one.crowd), "id": len(truth) + 1})
        for score, label, box in zip(objects.scores, objects.labels, objects.boxes, strict=True):
            left, top, right_side, bottom = box.tolist()
            sides = [left, top, right_side - left, bottom - top]
            each = {"image_id": i, "category_id": int(label), "score": float(score)}
            given.append({**each, "bbox": sides})
    with contextlib.redirect_stdout(io.StringIO()):
        data = COCO()
        categories = [{"id": i, "name": str(i)} for i in range(3)]
        shown = [{"id": i} for i in range(len(made))]
        data.dataset = {"images": shown, "annotations": truth, "categories": categories}
        data.createIndex()
        judge = COCOeval(data, data.loadRes(given), "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    return float(judge.stats[0]), float(judge.stats[1])


def test_the_precision_of_a_sample_of_images_is_that_of_pycocotools() -> None:
    made = images()
    found = [detection.match(*one) for one in made]
    drawn = np.array([0, 0, 1, 3, 5, 7, 7, 7, 8, 11])
    weights = np.stack([np.ones(len(made)), np.bincount(drawn, minlength=len(made))])
    whole, half = (detection.precision(found, ious)(weights) for ious in (10, 1))
    for row, chosen in ((0, made), (1, [made[i] for i in drawn])):
        expected = by_coco(chosen)
        assert 0.05 < expected[0] < expected[1] < 0.95
        assert whole[row] == pytest.approx(expected[0], abs=1e-12 if row == 0 else 2e-3)
        assert half[row] == pytest.approx(expected[1], abs=1e-12 if row == 0 else 2e-3)


def test_a_candidate_whose_boxes_are_off_loses_and_an_equal_one_is_judged_by_imagined_images() -> (
    None
):
    made = images()
    found = [detection.match(*one) for one in made]
    off = [detection.match(Objects(o.scores, o.labels, o.boxes + 6.0), t) for o, t in made]
    ones = np.ones((1, len(made)))
    metric = detection.compare_precision(found, off, 0.95, 10)
    assert metric.candidate(ones)[0] < metric.baseline(ones)[0] - 0.1
    same = detection.compare_precision(found, found, 0.95, 10)
    assert same.imagined is not None
    (baseline, candidate), _ = same.imagined
    assert candidate(ones)[0] < baseline(ones)[0]


def test_images_without_any_object_are_refused() -> None:
    empty = [detection.match(o, []) for o, _ in images(3)]
    with pytest.raises(DataError, match="no image has an object"):
        detection.compare_precision(empty, empty, 0.95, 10)
