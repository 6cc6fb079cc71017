"""Metrics of label maps and of depths, by image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from optimizer.foundation.errors import DataError
from optimizer.validate.quality import per_example
from optimizer.validate.quality.metrics import Metric, Value, mean_of_examples
from optimizer.validate.quality.significance import Floats

Array = npt.NDArray[np.generic]
IGNORED = 255  # value of a mask for a pixel that counts as nothing, as in transformers
FAR = 1.25  # ratio of two depths that delta1 counts as equal


@dataclass(frozen=True)
class Labels:
    """Label map of an image, at the places of the model's output.

    ids: label of each place
    areas: (labels, 2) numbers of pixels of the image: that have this label in answer and mask, and
        that have it in either; None without a mask
    """

    ids: Array
    areas: Floats | None


def count_areas(ids: Array, mask: Array, labels: int, name: str) -> Floats:
    """Count, for each label, the pixels that have it in both maps and in either: (labels, 2).

    ids: answered label of each pixel
    mask: right label of each pixel
    labels: number of labels
    name: name of the image, for messages

    Raises DataError for a value of `mask` without a label.
    """
    judged = mask != IGNORED if labels <= IGNORED else np.ones(mask.shape, bool)
    right, chosen = mask[judged].astype(np.int64), ids[judged].astype(np.int64)
    if right.size and not 0 <= int(right.min()) <= int(right.max()) < labels:
        wrong = right[(right < 0) | (right >= labels)]
        raise DataError(
            f"{name} has the value {int(wrong[0])}, and the model has {labels} labels",
            where="validate.data: columns.mask",
            accepted=f"label ids 0..{labels - 1}, and {IGNORED} for a pixel that does not count",
            fix="Set reduce_labels: true in the data if 0 is background that does not count.",
        )
    same = np.bincount(right[right == chosen], minlength=labels)
    either = np.bincount(right, minlength=labels) + np.bincount(chosen, minlength=labels) - same
    return np.stack([same, either], -1).astype(np.float64)


def mean_iou(baseline: Sequence[Labels], candidate: Sequence[Labels]) -> Metric:
    """Metric: mean over labels of intersection over union, each summed over all images. A label
    counts where the mask or the answer has it."""
    return Metric(_iou(baseline), _iou(candidate))


def _iou(images: Sequence[Labels]) -> Value:
    stacked = np.stack([i.areas for i in images if i.areas is not None])

    def value(weights: Floats) -> Floats:
        same, either = weights @ stacked[..., 0], weights @ stacked[..., 1]
        ratio = np.divide(same, either, out=np.zeros_like(same), where=either > 0)
        return np.asarray(ratio.sum(1) / np.maximum((either > 0).sum(1), 1), np.float64)

    return value


def same_labels(
    baseline: Sequence[Labels], candidate: Sequence[Labels], confidence: float
) -> Metric:
    """Metric: mean over images of the share of places with the baseline's label."""
    pairs = zip(baseline, candidate, strict=True)
    each = np.array([float((a.ids == b.ids).mean()) for a, b in pairs])
    record = per_example.values("agreement", each)
    return mean_of_examples(np.ones(len(each)), each, 1.0, confidence, record)


@dataclass(frozen=True)
class Depths:
    """Errors of an image's depths after alignment; None where the right depths are unknown.

    relative: mean of |value - right| / right
    near: share of depths whose ratio to the right one is below FAR
    """

    relative: float | None = None
    near: float | None = None


def compare_depths(values: Floats, right: Array, name: str) -> Depths:
    """Measure the errors of depths after the scale and offset that fit best (least squares),
    because many models give values without a unit.

    values: depths that the model gives
    right: right depths, or inverse depths where the model gives these; 0, negative or not finite:
        unknown
    name: name of the image, for messages

    Raises DataError for fewer than two right depths.
    """
    truth: Floats = right.astype(np.float64)
    known = np.isfinite(truth) & (truth > 0)
    if known.sum() < 2:
        raise DataError(
            f"the depth map {name} has {int(known.sum())} values above 0",
            where="validate.data: columns.depth",
            accepted="2 or more values above 0; 0 where the depth is unknown",
        )
    x, y = values[known].astype(np.float64), truth[known]
    spread = float(x.var())
    scale = float(((x - x.mean()) * (y - y.mean())).mean() / spread) if spread > 0 else 0.0
    fitted = scale * (x - x.mean()) + y.mean()
    relative = float((np.abs(fitted - y) / y).mean())
    ratio = np.maximum(fitted / y, y / np.where(fitted > 0, fitted, np.nan))
    return Depths(relative, float((ratio < FAR).mean()))


def relative_error(
    baseline: Sequence[Depths], candidate: Sequence[Depths], confidence: float
) -> Metric:
    """Metric: minus the mean over images of |value - right| / right, so that more is better."""
    a, b = (-np.array([i.relative for i in part], np.float64) for part in (baseline, candidate))
    record = per_example.values("abs_rel", b)
    return mean_of_examples(a, b, 1.0, confidence, record)


def near_depths(
    baseline: Sequence[Depths], candidate: Sequence[Depths], confidence: float
) -> Metric:
    """Metric: mean over images of the share of depths whose ratio to the right one is below FAR."""
    a, b = (np.array([i.near for i in part], np.float64) for part in (baseline, candidate))
    return mean_of_examples(a, b, 1.0, confidence, per_example.values("delta1", b))
