"""Check a detector's answers against the model's outputs, read in float64.

compared   objects, with label, probability and box, of up to ANSWERED images. Which overlap, is
           read from a table of all pairs, which leaves the same as ONNX Runtime's NonMaxSuppression
limit      the float32 rounding of a sigmoid or softmax and of a corner, as in pipeline_answers.py.
           Images are left out where rounding decides: a probability at the threshold, two equal
           ones, or two boxes that overlap by just the limit
caught     boxes of another form, place or unit, another threshold, no suppression, another label:
           test_a_fault_of_a_detectors_answers_is_caught
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch

from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.inputs import image_file
from optimizer.harness.inputs.batch import Array
from optimizer.harness.runtimes.runner import Runner
from optimizer.harness.tasks.answering import Predictor, Query, answer
from optimizer.validate.ledger.laws.answer_fields import Near, differ
from optimizer.validate.ledger.laws.image_laws import open_by_pillow
from optimizer.validate.ledger.laws.images.pipeline_answers import CORNER, EXPONENTIAL
from optimizer.validate.ledger.pieces.roundoff import SMALLEST, UNIT
from optimizer.validate.materials import Materials

ANSWERED = 8  # images
NAMES = ("xmin", "ymin", "xmax", "ymax")


def compare_answers(m: Materials, served: Contract, encoder: Any, runner: Runner) -> list[str]:
    """Return sentences on answers that differ from what the outputs say. The arguments are those of
    answer_laws.compare_answers."""
    images = list(dict.fromkeys(m.texts))[:ANSWERED]
    queries = [Query(f"image {i + 1}", image) for i, image in enumerate(images)]
    answered = list(answer(Predictor(served, encoder, runner.infer), queries, ANSWERED))
    outputs = runner.infer(tasks.encode(served, encoder, images))
    problems: list[str] = []
    for i, (one, image) in enumerate(zip(answered, images, strict=True)):
        opened = open_by_pillow(image, image_file.MODES[m.contract.images.channels])
        row = {o.name: np.asarray(outputs[o.name][i], np.float64) for o in m.contract.outputs}
        expected = read_objects(m.contract, row, (opened.height, opened.width))
        if expected is not None:
            problems += (f"{one.where}: {p}" for p in differ(one.answer or {}, expected))
    return problems


def read_objects(
    contract: Contract, row: dict[str, Array], sides: tuple[int, int]
) -> dict[str, Any] | None:
    """Return the expected answer about one image; None where rounding decides about it.

    row: {output: float64 array of the image}
    sides: height and width of the image
    """
    settings, labels = contract.candidates, contract.labels or ()
    fields = _join(row, settings.count_fields(len(labels)))
    scores, bound = _probabilities(contract, fields[:, 4:])
    threshold = settings.threshold
    if (np.abs(scores - threshold) <= bound).any():
        return None
    corners = _corners(fields[:, :4], settings.box)
    if settings.units == "share":
        corners = corners * np.tile([contract.images.width, contract.images.height], 2)
    if settings.nms is not None and not _are_apart(corners, scores, threshold, settings.nms):
        return None
    chosen = [
        (float(scores[label, at]), label, at)
        for label, at in suppress(corners, scores, threshold, settings.nms, settings.most)
    ]
    chosen = sorted(chosen, key=lambda one: -one[0])[: settings.most]
    if any(one[0] - two[0] <= 2 * bound for one, two in pairwise(chosen)):
        return None
    image = contract.images
    height, width = sides
    stretched = np.array([width / image.width, height / image.height])
    start = np.zeros(2)
    if image.letterbox is not None:
        stretched = np.full(2, stretched.max())
        if image.letterbox.place == "centre":
            new = np.round(np.array([width, height]) / stretched).clip(1)
            start = (np.array([image.width, image.height]) - new) // 2
    reach = CORNER * UNIT["fp32"] * float(np.abs(corners).max(initial=1.0)) * stretched.max()
    objects = []
    for score, label, at in chosen:
        exact = (corners[at].reshape(2, 2) - start) * stretched
        exact = exact.clip(0, [width, height]).ravel()
        box = {
            name: Near(int(value), float(int(value - reach) != int(value + reach)))
            for name, value in zip(NAMES, exact, strict=True)
        }
        objects.append({"score": Near(score, bound), "label": labels[label], "box": box})
    return {"objects": objects}


def _join(row: dict[str, Array], accepted: tuple[int, ...]) -> Array:
    """Join a judged detector's outputs to (candidates, fields): each output as it is or transposed,
    so that the numbers of fields are those of the layout."""
    arrays = [a[:, None] if a.ndim == 1 else a for a in row.values()]
    for turned in (False, True):
        columns = [a.T if turned and len(a.shape) == 2 and a.shape[1] > 1 else a for a in arrays]
        fits = len({len(c) for c in columns}) == 1
        if fits and sum(c.shape[1] for c in columns) in accepted:
            return np.concatenate(columns, 1)
    raise AssertionError  # tasks.check refuses such outputs


def _probabilities(contract: Contract, fields: Array) -> tuple[Array, float]:
    """Return (expected probabilities (labels, candidates), 0 for all but a candidate's best label;
    bound on their float32 rounding)."""
    settings, count = contract.candidates, len(contract.labels or ())
    wide, bound = torch.from_numpy(np.ascontiguousarray(fields)), SMALLEST["fp32"]
    if settings.layout == "final":
        best, ids = wide[:, 0], wide[:, 1].round().long()
        known = (ids >= 0) & (ids < count)
        best, ids = best * known, ids.clamp(0, count - 1)
    else:
        if settings.activation == "sigmoid":
            wide, bound = wide.sigmoid(), (EXPONENTIAL + 4) * UNIT["fp32"]
        elif settings.activation == "softmax":
            shifted = float((wide.max(1, keepdim=True).values - wide).max())
            bound = 2 * UNIT["fp32"] * (2 * shifted + 2 * EXPONENTIAL + wide.shape[1] + 1)
            wide = wide.softmax(1)[:, :-1]
        if settings.layout == "objectness":
            wide, bound = wide[:, 1:] * wide[:, :1], 2 * bound + UNIT["fp32"]
        best, ids = wide.max(1)
    scores = np.zeros((count, len(best)))
    scores[ids.numpy(), np.arange(len(best))] = best.numpy()
    return scores, bound


def _corners(boxes: Array, kind: str) -> Array:
    """Return expected boxes (candidates, 4) as left, top, right, bottom."""
    x, y, third, fourth = boxes.T
    if kind == "xyxy":
        return np.asarray(boxes)
    if kind == "xywh":
        return np.stack([x, y, x + third, y + fourth], 1)
    return np.stack([x - third / 2, y - fourth / 2, x + third / 2, y + fourth / 2], 1)


def _overlap(boxes: Array) -> tuple[Array, Array]:
    """Return, for the expected answer, the areas (boxes, boxes) of the intersection and the union
    of each two boxes; a box with a negative side has none."""
    low, high = boxes[:, :2], boxes[:, 2:]
    sides = np.minimum(high[:, None], high) - np.maximum(low[:, None], low)
    both, area = sides.clip(0).prod(2), (high - low).clip(0).prod(1)
    return both, area[:, None] + area - both


def _are_apart(corners: Array, scores: Array, threshold: float, overlap: float) -> bool:
    """Return True if no two boxes of one label above the threshold overlap by `overlap`, within
    float32 rounding."""
    for label in range(len(scores)):
        boxes = corners[scores[label] >= threshold]
        both, union = _overlap(boxes)
        # a side is a difference of two corners; an area has two sides, a union three areas
        reach = 16 * UNIT["fp32"] * float(np.abs(boxes).max(initial=1.0)) ** 2
        if ((np.abs(both - overlap * union) <= reach) & (both > 0)).any():
            return False
    return True


def suppress(
    corners: Array, scores: Array, threshold: float, overlap: float | None, most: int
) -> list[tuple[int, int]]:
    """Return the expected (label id, candidate) of the candidates from the threshold on, at most
    `most` of each label. Without those that a more probable one of the label overlaps by more than
    `overlap`.

    corners: (candidates, 4)
    scores: (labels, candidates)
    overlap: intersection over union; None: no candidate is left out
    """
    chosen: list[tuple[int, int]] = []
    for label, row in enumerate(scores):
        order = np.flatnonzero(row >= threshold)
        order = order[np.argsort(-row[order], kind="stable")]
        both, union = _overlap(corners[order])
        kept: list[int] = []
        for at in range(len(order)):
            free = overlap is None or not (both[at, kept] > overlap * union[at, kept]).any()
            kept += [at] if free and len(kept) < most else []
        chosen += [(label, int(order[at])) for at in kept]
    return chosen
