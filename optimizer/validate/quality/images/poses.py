"""Average precision of poses as COCO defines it (pycocotools, iouType keypoints: all areas, at most
20 poses in an image), and the share of keypoints that are near (PCK).

    oks     object keypoint similarity: mean over labelled keypoints of exp(-d^2 / (2 area s^2)),
            d distance in pixels, s twice COCO's constant of the keypoint
    near    d is less than NEAR times the longer side of the box, as mmpose's PCKAccuracy
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optimizer.data.image_truth.poses import Pose
from optimizer.foundation.errors import DataError
from optimizer.harness.tasks.images.object_detection import Objects
from optimizer.validate.quality.images.detection import (
    IOUS,
    Booleans,
    Found,
    compare_precision,
    match_overlaps,
)
from optimizer.validate.quality.metrics import Metric, Value
from optimizer.validate.quality.significance import Floats

# nose; eyes, ears, shoulders, elbows, wrists, hips, knees, ankles, left and right alike
SIGMAS = np.array([26, *np.repeat([25, 35, 79, 72, 62, 107, 87, 89], 2)]) / 1000
MOST = 20
WIDEST = 1e10  # area of the largest pose, in pixels; one that is larger and wrong is not counted
NEAR = 0.05


@dataclass(frozen=True)
class Poses(Found):
    """Poses that a system gives one image.

    near: (2,): number of labelled keypoints that are near the right ones, and of all labelled ones
    """

    near: Floats


def match(places: Floats, scores: Floats, truth: Sequence[Pose] | None) -> Poses:
    """Match poses with the right ones: each, in order of its score, with the free one that is most
    similar.

    places: (poses, keypoints, 2) in pixels; the poses of `truth` that are read, in their order
    scores: (poses, keypoints)
    truth: right poses of the image; None: unknown
    """
    places, scores = places.astype(np.float64), scores.mean(1)
    near, theirs = np.zeros((1, 2)), sorted(truth or (), key=_left_out)
    if truth is not None:
        read = [pose for pose in truth if pose.read]
        near = np.array([_near(*both) for both in zip(places, read, strict=True)])
    order = np.argsort(-scores, kind="stable")[:MOST]
    left_out = np.array([_left_out(t) for t in theirs], bool)
    crowd = np.array([t.crowd for t in theirs], bool)
    hit, ignored = (np.zeros((len(IOUS), len(order)), bool) for _ in range(2))
    of_coco = places.shape[1] == len(SIGMAS) and truth is not None
    if of_coco:
        similar = np.array([[oks(places[i], t) for t in theirs] for i in order])
        hit, ignored = match_overlaps(similar, crowd, left_out)
    spans = np.ptp(places[order], axis=1)
    ignored |= ~hit & (np.prod(spans, -1) > WIDEST)
    return Poses(
        objects=Objects(scores, np.zeros(len(scores), np.int64), places.min(1)),
        label=np.zeros(len(order), np.int64),
        score=scores[order].astype(np.float64),
        hit=hit,
        ignored=ignored,
        right=np.zeros(int((~left_out).sum()), np.int64) if of_coco else None,
        near=near.sum(0),
    )


def _left_out(pose: Pose) -> bool:
    """Return True for a right pose that need not be matched."""
    return pose.crowd or pose.labelled == 0


def oks(places: Floats, truth: Pose) -> float:
    """Compute the object keypoint similarity of keypoints (keypoints, 2) and a right pose. A right
    pose without labelled keypoints, such as a crowd, is replaced by its box, twice as large on all
    sides."""
    left, top, width, height = truth.box
    right = np.array(truth.keypoints, np.float64).reshape(-1, 3)
    known: Booleans = right[:, 2] > 0
    if known.any():
        apart = places - right[:, :2]
    else:
        low = np.array([left - width, top - height])
        high = np.array([left + 2 * width, top + 2 * height])
        apart = np.maximum(0, low - places) + np.maximum(0, places - high)
        known = np.ones(len(places), bool)
    error = (apart**2).sum(-1) / (2 * SIGMAS) ** 2 / (truth.area + np.spacing(1)) / 2
    return float(np.exp(-error[known]).sum() / known.sum())


def _near(places: Floats, truth: Pose) -> tuple[int, int]:
    right = np.array(truth.keypoints, np.float64).reshape(-1, 3)
    known: Booleans = right[:, 2] > 0
    apart = np.linalg.norm(places[: len(right)] - right[:, :2], axis=-1)
    return int((apart[known] < NEAR * max(truth.box[2:])).sum()), int(known.sum())


def average_precision(
    baseline: Sequence[Found], candidate: Sequence[Found], confidence: float
) -> Metric:
    """Metric: mean average precision over similarities of 0.5 to 0.95. Raises DataError for a model
    whose keypoints are not COCO's."""
    if baseline[0].right is None:
        raise DataError(
            f"oks_map has constants for COCO's {len(SIGMAS)} keypoints, and the model has others",
            where="validate.metric",
            accepted="pck, cosine",
        )
    return compare_precision(baseline, candidate, confidence, len(IOUS))


def near_keypoints(baseline: Sequence[Poses], candidate: Sequence[Poses]) -> Metric:
    """Metric: share of the labelled keypoints of all images that are near."""
    return Metric(_share(baseline), _share(candidate))


def _share(images: Sequence[Poses]) -> Value:
    counts = np.stack([i.near for i in images]).astype(np.float64)

    def value(weights: Floats) -> Floats:
        near, known = (weights @ counts).T
        return np.asarray(near / np.maximum(known, 1), np.float64)

    return value
