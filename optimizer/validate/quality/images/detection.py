"""Mean average precision, as COCO defines it (pycocotools' COCOeval: all areas, at most 100
objects of a label in an image, 101 places of recall), with a weight per image.

    Found      objects that a system gives one image, matched with the right ones
    precision  weights of images -> mean average precision
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from optimizer.data.image_truth.objects import Labelled
from optimizer.foundation.errors import DataError
from optimizer.harness.tasks.images.object_detection import THRESHOLD, Objects
from optimizer.validate.quality import per_example
from optimizer.validate.quality.metrics import Metric, Value, mean_of_examples
from optimizer.validate.quality.significance import Floats

IOUS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0.0, 1.0, 101)
MOST = 100  # objects of a label in an image that count
SAME = 0.5  # intersection over union of two systems' boxes that agree

Booleans = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Found:
    """Objects that a system gives one image, matched with the right objects, the most probable
    first.

    objects: all objects
    label, score: label id and probability of each object that counts
    hit: (IOUS, objects), True for an object that is matched with a right one
    ignored: (IOUS, objects), True for an object that counts neither as right nor as wrong, such as
        one that is matched with a crowd
    right: label id of each right object, without crowds; None where the data have no right objects
    threshold: probability above which objects are answered
    labels: (label of a right object, label of the most probable answered object there) of the right
        objects that an answered one overlaps by SAME, whatever their labels: (pairs, 2)
    """

    objects: Objects
    label: Integers
    score: Floats
    hit: Booleans
    ignored: Booleans
    right: Integers | None
    threshold: float = field(default=THRESHOLD, kw_only=True)
    labels: Integers = field(default_factory=lambda: np.empty((0, 2), np.int64), kw_only=True)


def match(
    objects: Objects, truth: Sequence[Labelled] | None, threshold: float = THRESHOLD
) -> Found:
    """Match the objects of one image with the right ones of the same label. Each object, in order
    of probability, is matched with the free right object that it overlaps most.

    truth: right objects of the image; None: unknown
    threshold: probability above which objects are answered
    """
    labels: list[Integers] = [np.empty(0, np.int64)]
    scores: list[Floats] = [np.empty(0)]
    hits: list[Booleans] = [np.empty((len(IOUS), 0), bool)]
    ignored = list(hits)
    for label in np.unique(objects.labels) if truth is not None else ():
        mine = np.flatnonzero(objects.labels == label)
        mine = mine[np.argsort(-objects.scores[mine], kind="stable")][:MOST]
        theirs = sorted((t for t in truth or () if t.label == label), key=lambda t: t.crowd)
        crowd = np.array([t.crowd for t in theirs], bool)
        overlaps = _overlaps(objects.boxes[mine], np.array([t.box for t in theirs]), crowd)
        hit, left_out = match_overlaps(overlaps, crowd, crowd)
        labels.append(np.full(len(mine), label))
        scores.append(objects.scores[mine].astype(np.float64))
        hits.append(hit)
        ignored.append(left_out)
    right = None
    if truth is not None:
        right = np.array([t.label for t in truth if not t.crowd], np.int64)
    return Found(
        objects,
        np.concatenate(labels),
        np.concatenate(scores),
        np.concatenate(hits, 1),
        np.concatenate(ignored, 1),
        right,
        threshold=threshold,
        labels=_pair_labels(objects.above(threshold), truth or ()),
    )


def _pair_labels(answered: Objects, truth: Sequence[Labelled]) -> Integers:
    """Pair labels of right objects with those of answered ones, as `labels` of Found."""
    right = [t for t in truth if not t.crowd]
    if not right or not len(answered.scores):
        return np.empty((0, 2), np.int64)
    crowd = np.zeros(len(right), bool)
    overlaps = _overlaps(answered.boxes, np.array([t.box for t in right]), crowd)
    scores = np.where(overlaps >= SAME, answered.scores[:, None], -1.0)
    labels = np.array([t.label for t in right], np.int64)
    pairs = np.stack([labels, answered.labels[scores.argmax(0)]], 1)
    return np.asarray(pairs[scores.max(0) >= 0], np.int64)


def _overlaps(boxes: Floats, truth: Floats, crowd: Booleans) -> Floats:
    """Compute the intersection over union (boxes, truth). Where the right object is a crowd, the
    intersection is divided by the area of the box instead.

    boxes: (boxes, 4): left, top, right, bottom
    truth: (truth, 4): left, top, width, height
    crowd: (truth,), True for a crowd
    """
    if not len(truth):
        return np.zeros((len(boxes), 0))
    boxes = boxes.astype(np.float64)
    low = np.maximum(boxes[:, None, :2], truth[None, :, :2])
    high = np.minimum(boxes[:, None, 2:], truth[None, :, :2] + truth[None, :, 2:])
    inside = np.prod(np.maximum(high - low, 0.0), -1)
    own = np.prod(boxes[:, 2:] - boxes[:, :2], -1)[:, None]
    union = np.where(crowd[None], own, own + np.prod(truth[:, 2:], -1)[None] - inside)
    return np.asarray(np.divide(inside, union, out=np.zeros_like(inside), where=union > 0))


def match_overlaps(
    overlaps: Floats, crowd: Booleans, left_out: Booleans
) -> tuple[Booleans, Booleans]:
    """Match objects with right ones at each threshold of IOUS: (hit, ignored), each (IOUS, objects)
    bool as in Found.

    overlaps: (objects, truth), with the right objects that are left out last
    crowd: (truth,), True for a right object that several objects may match
    left_out: (truth,), True for a right object that counts neither as right nor as wrong
    """
    hit, ignored = (np.zeros((len(IOUS), len(overlaps)), bool) for _ in range(2))
    for t, least in enumerate(IOUS):
        free = np.ones(overlaps.shape[1], bool)
        for d, row in enumerate(overlaps):
            best, at = min(least, 1 - 1e-10), -1
            for g in np.flatnonzero(free | crowd):
                if left_out[g] and at >= 0 and not left_out[at]:
                    break  # a right object is better than one that does not count
                if row[g] >= best:
                    best, at = row[g], int(g)
            if at >= 0:
                hit[t, d], ignored[t, d] = not left_out[at], left_out[at]
                free[at] = False
    return hit, ignored


def precision(images: Sequence[Found], ious: int, added: tuple[float, float] = (0, 0)) -> Value:
    """Return the function weights (rows, images) -> mean average precision (rows,), over the labels
    with a right object in an image of weight above 0 and over the first `ious` thresholds of IOUS.

    added: (number of added right objects of the rarest label, number of them that are found)
    """
    counts = _right(images)
    rarest = int(np.argmin(np.where(counts.any(0), counts.sum(0), np.inf)))
    labels = [
        _LabelObjects(
            images, int(label), counts[:, label], ious, added if label == rarest else (0, 0)
        )
        for label in np.flatnonzero(counts.any(0))
    ]

    def value(weights: Floats) -> Floats:
        each = np.stack([label.average_precision(weights) for label in labels])
        exists = np.isfinite(each)
        number = np.maximum(exists.sum(0), 1)
        return np.asarray(np.where(exists, each, 0.0).sum(0) / number, np.float64)

    return value


def _right(images: Sequence[Found]) -> Floats:
    """Count the right objects of each label in each image: (images, labels)."""
    labels = 1 + max(int(i.right.max()) for i in images if i.right is not None and i.right.size)
    return np.stack(
        [np.bincount(np.array(i.right, np.int64), minlength=labels) for i in images]
    ).astype(np.float64)


class _LabelObjects:
    """The objects of one label in all images, the most probable first."""

    def __init__(
        self,
        images: Sequence[Found],
        label: int,
        counts: Floats,
        ious: int,
        added: tuple[float, float],
    ) -> None:
        chosen = [np.flatnonzero(i.label == label) for i in images]
        score = np.concatenate([i.score[c] for i, c in zip(images, chosen, strict=True)])
        order = np.argsort(-score, kind="stable")
        hit = np.concatenate([i.hit[:ious, c] for i, c in zip(images, chosen, strict=True)], 1)
        out = np.concatenate([i.ignored[:ious, c] for i, c in zip(images, chosen, strict=True)], 1)
        hit, out = hit[:, order], out[:, order]
        # recall grows, and precision has its maxima, at hits alone
        self._ends = np.flatnonzero(hit.any(0))
        last = int(self._ends[-1]) + 1 if len(self._ends) else 0
        image = np.repeat(np.arange(len(images)), [len(c) for c in chosen])[order]
        self._hit, self._out, self._image = hit[:, self._ends], out[:, :last], image[:last]
        self._counts, self._added = counts, added

    def average_precision(self, weights: Floats) -> Floats:
        """Compute a judged detector's average precision (rows,) of the label; NaN in a row of
        weights without a right object.

        weights: (rows, images)
        """
        more, hit_first = self._added
        right = weights @ self._counts + more
        each = weights[:, self._image]
        sums = self._sum_between(each)
        total = np.zeros(len(weights))
        for hit, out in zip(self._hit, self._out, strict=True):
            hits = np.cumsum(each[:, self._ends] * hit, 1) + hit_first
            between = self._sum_between(each * ~out) if out.any() else sums
            counted = np.cumsum(between, 1) + hit_first
            if hit_first:  # before all others
                first = np.full((len(weights), 1), float(hit_first))
                hits, counted = np.hstack([first, hits]), np.hstack([first, counted])
            recall = hits / np.where(right > 0, right, 1.0)[:, None]
            precise = hits / np.maximum(counted, np.spacing(1))
            envelope = np.maximum.accumulate(precise[:, ::-1], 1)[:, ::-1]
            for row in range(len(weights)):
                at = np.searchsorted(recall[row], RECALLS, side="left")
                reached = at < recall.shape[1]
                total[row] += envelope[row, at[reached]].sum() / len(RECALLS)
        return np.where(right > 0, total / len(self._hit), np.nan)

    def _sum_between(self, each: Floats) -> Floats:
        """Sum weights (rows, objects) from behind one of `_ends` to the next: (rows, ends)."""
        starts = np.concatenate([[0], self._ends[:-1] + 1]) if len(self._ends) else self._ends
        return np.asarray(np.add.reduceat(each, starts, 1)) if len(starts) else each


def compare_precision(
    baseline: Sequence[Found], candidate: Sequence[Found], confidence: float, ious: int
) -> Metric:
    """Compare the mean average precision of two systems. The imagined images of f1_metric are here
    objects of the rarest label that only one system finds. Raises DataError where no image has a
    right object.

    ious: number of thresholds of IOUS
    """
    if not any(i.right is not None and i.right.size for i in baseline):
        raise DataError(
            "no image has an object, so no precision is defined",
            where="validate.data: columns.objects",
            accepted="images with objects; others beside them",
        )
    extra = math.ceil(-math.log(1 - confidence))

    def systems(one: float, other: float) -> tuple[Value, Value]:
        both = precision(baseline, ious, (extra, one)), precision(candidate, ious, (extra, other))
        return both

    return Metric(
        precision(baseline, ious),
        precision(candidate, ious),
        imagined=(systems(extra, 0), systems(0, extra)),
    )


def measure_agreement(
    baseline: Sequence[Found], candidate: Sequence[Found], confidence: float
) -> Metric:
    """Measure the F1 of the candidate's objects among the baseline's, as the mean over images.

    Objects count above the probability with which they are answered. Two are the same if they have
    one label and their boxes overlap by SAME or more. An image without objects of both systems
    counts 1. Raises DataError where the baseline finds no object in any image.
    """
    ours, theirs = ([i.objects.above(i.threshold) for i in part] for part in (candidate, baseline))
    if not any(len(o.scores) for o in theirs):
        raise DataError(
            f"the float model finds no object above {baseline[0].threshold} in any of "
            f"{len(theirs)} images",
            where="validate.data",
            accepted="images in which it finds some; metric map, which reads all objects",
        )
    each = np.array([_f1(*both) for both in zip(theirs, ours, strict=True)])
    record = per_example.values("agreement", each)
    return mean_of_examples(np.ones(len(each)), each, 1.0, confidence, record)


def _f1(theirs: Objects, ours: Objects) -> float:
    truth = []
    for label, box in zip(theirs.labels, theirs.boxes, strict=True):
        left, top, right, bottom = map(float, box)
        truth.append(Labelled(int(label), (left, top, right - left, bottom - top)))
    total = len(truth) + len(ours.scores)
    return 1.0 if not total else 2 * float(match(ours, truth).hit[0].sum()) / total
