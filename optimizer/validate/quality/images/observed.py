"""Tables of the observations that metrics read of an image's answer, and of these metrics.

OBSERVE   values of the task's `decode` (of all boxes, where it reads several), sides of the image,
          row of the data -> observation
METRICS   observations of two systems -> Metric
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from optimizer.data.datasets import Sample
from optimizer.data.image_truth.maps import read_map
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.inputs.batch import Array
from optimizer.harness.tasks.images import (
    depth_estimation,
    detector,
    image_segmentation,
    keypoint_detection,
    object_detection,
    universal_segmentation,
)
from optimizer.harness.tasks.images.heatmaps import keypoints
from optimizer.validate.quality.images import detection, maps, poses
from optimizer.validate.quality.metrics import Metric

Observe = Callable[[Contract, Array, tuple[int, ...], Sample], Any]
Compare = Callable[[Sequence[Any], Sequence[Any], float], Metric]


def _objects(contract: Contract, values: Array, sides: tuple[int, ...], row: Sample) -> Any:
    return detection.match(object_detection.objects(contract, values, sides), row.objects)


def _candidates(contract: Contract, values: Array, sides: tuple[int, ...], row: Sample) -> Any:
    objects = detector.objects(contract, values, sides)
    return detection.match(objects, row.objects, contract.candidates.threshold)


def _labels(contract: Contract, values: Array, sides: tuple[int, ...], row: Sample) -> Any:
    ids, areas = values.argmax(0).astype(np.uint16), None
    if row.mask is not None:
        mask = read_map(row.mask, sides, "validate.data: columns.mask")
        if row.reduced:
            mask = np.where(mask == 0, maps.IGNORED, mask.astype(np.int64) - 1)
        whole = image_segmentation.label_map(values, sides)
        areas = maps.count_areas(whole, mask, len(contract.labels or ()), row.mask.name)
    return maps.Labels(ids, areas)


def _labels_of_queries(
    contract: Contract, values: Array, sides: tuple[int, ...], row: Sample
) -> Any:
    return _labels(contract, universal_segmentation.label_scores(contract, values), sides, row)


def _depths(contract: Contract, values: Array, sides: tuple[int, ...], row: Sample) -> Any:
    del contract
    if row.depth is None:
        return maps.Depths()
    right = read_map(row.depth, sides, "validate.data: columns.depth")
    return maps.compare_depths(depth_estimation.depth_map(values, sides), right, row.depth.name)


def _poses(contract: Contract, values: Array, sides: tuple[int, ...], row: Sample) -> Any:
    image = contract.images
    whole = (0.0, 0.0, float(sides[1]), float(sides[0]))
    boxes = [whole] if row.boxes is None else row.boxes
    each = [
        keypoints(heatmaps, box, image.height, image.width)
        for heatmaps, box in zip(values, boxes, strict=True)
    ]
    places, scores = (np.stack(part) for part in zip(*each, strict=True))
    return poses.match(places, scores, row.keypoints)


OBSERVE: Mapping[str, Observe] = {
    object_detection.TASK.name: _objects,
    detector.TASK.name: _candidates,
    image_segmentation.TASK.name: _labels,
    universal_segmentation.TASK.name: _labels_of_queries,
    depth_estimation.TASK.name: _depths,
    keypoint_detection.TASK.name: _poses,
}
METRICS: Mapping[tuple[type, str], Compare] = {
    (detection.Found, "map"): partial(detection.compare_precision, ious=len(detection.IOUS)),
    (detection.Found, "map50"): partial(detection.compare_precision, ious=1),
    (detection.Found, "agreement"): detection.measure_agreement,
    (maps.Labels, "miou"): lambda a, b, _confidence: maps.mean_iou(a, b),
    (maps.Labels, "agreement"): maps.same_labels,
    (maps.Depths, "abs_rel"): maps.relative_error,
    (maps.Depths, "delta1"): maps.near_depths,
    (poses.Poses, "oks_map"): poses.average_precision,
    (poses.Poses, "pck"): lambda a, b, _confidence: poses.near_keypoints(a, b),
}
"""{(type of an observation, metric): function of both systems' observations}."""
COLUMNS = {
    metric: alternatives[0]
    for task in OBSERVE
    for metric, alternatives in tasks.find_task(task).metrics.items()
    if alternatives
}
"""{metric: columns that it needs}."""


def chosen_labels(seen: Sequence[Any] | None) -> Array | None:
    """Return the labels of all places of label maps, as one array: empty for observations of
    another kind, None without observations."""
    if seen is None:
        return None
    ids = [o.ids.ravel() for o in seen if isinstance(o, maps.Labels)]
    return np.concatenate(ids) if ids else np.empty(0)
