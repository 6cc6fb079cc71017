"""detector: labelled boxes of an image, from outputs of an ONNX file or torch module, in pixels of
the image as it was given.

The contract's section `detections` says what the outputs hold (detection_settings.py), its section
`image` how images enter the model, and so where a box of the model's input lies in the image.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import require
from ...inputs.batch import Array, Batch
from ...inputs.image import IMAGE_OF_FILE
from .. import tensors
from ..task import Task, unchanged
from ..text_classification import sigmoid, softmax
from . import NOT_IN_BROWSER, object_detection
from .object_detection import BOX, OBJECT, Objects

if TYPE_CHECKING:
    from ...contract import Contract


def find_fields(contract: Contract) -> int:
    """Return for a detector the axis of the candidates' fields in outputs (row, axis 1, axis 2): 1
    or 2.

    An output of one axis beside the row has one field. Raises BundleError for outputs that do not
    have the fields of the section `detections`.
    """
    shapes = [tuple(int(axis) for axis in o.axes[1:]) for o in contract.outputs]
    accepted = contract.candidates.count_fields(len(contract.labels or ()))
    ends = {BOX} if contract.candidates.layout == "scores" else {BOX, BOX + 1}  # of a box's output
    if all(len(shape) in (1, 2) for shape in shapes):
        for axis in (2, 1):
            fields = [shape[axis - 1] if len(shape) == 2 else 1 for shape in shapes]
            counts = {shape[2 - axis] if len(shape) == 2 else shape[0] for shape in shapes}
            boxed = len(fields) == 1 or not ends.isdisjoint(accumulate(fields))
            if len(counts) == 1 and sum(fields) in accepted and boxed:
                return axis
    fields_text = " or ".join(map(str, accepted))
    require(
        False,
        "model.detections",
        f"outputs {', '.join(o.name for o in contract.outputs)} of a row with the shapes {shapes}",
        f"the outputs together {fields_text} numbers of each candidate, for layout "
        f"{contract.candidates.layout} and {len(contract.labels or ())} labels; of several outputs "
        "that of the boxes first. Set model.detections.labels to all names, layout, or the order "
        "in model.outputs",
    )
    raise AssertionError


def objects(
    contract: Contract, values: Array, sides: tuple[int, ...], least: float = 0.0
) -> Objects:
    """Return the objects that a detector sees in one image, the most probable first.

    values: (numbers,), all outputs of the row
    sides: height and width of the image
    least: probability below which a candidate is left out
    """
    settings, fields = contract.candidates, join_fields(contract, values)
    scores, labels = _score(fields[:, BOX:], settings.layout, settings.activation)
    known = (labels >= 0) & (labels < len(contract.labels or ()))  # a graph pads with others
    order = np.argsort(-scores, kind="stable")
    order = order[known[order] & (scores[order] >= least)]
    boxes = _corners(fields[order, :BOX], settings.box)
    if settings.units == "share":
        boxes = boxes * np.tile([contract.images.width, contract.images.height], 2)
    candidates = Objects(scores[order], labels[order], boxes.astype(np.float32))
    if settings.nms is None:
        kept = np.arange(min(settings.most, len(order)))
    else:
        kept = suppress(candidates, settings.nms, settings.most)
    boxes = _in_image(contract, candidates.boxes[kept], sides)
    return Objects(candidates.scores[kept], candidates.labels[kept], boxes)


def join_fields(contract: Contract, values: Array) -> Array:
    """Return the fields (candidates, fields) of a detector's outputs for one image.

    values: (numbers,), all outputs of the row
    """
    axis = find_fields(contract)
    arrays = tensors.split(contract, values[None]).values()
    columns = [a[0][:, None] if a.ndim == 2 else a[0] if axis == 2 else a[0].T for a in arrays]
    return np.concatenate(columns, 1)


def _score(fields: Array, layout: str, activation: str) -> tuple[Array, Array]:
    """Return (probability, label id) of each candidate of a detector, from its fields behind the
    box."""
    if layout == "final":
        return fields[:, 0], np.rint(fields[:, 1]).astype(np.int64)
    if activation == "sigmoid":
        fields = sigmoid(fields).astype(np.float32)
    elif activation == "softmax":
        fields = softmax(fields).astype(np.float32)[:, :-1]
    if layout == "objectness":
        fields = fields[:, 1:] * fields[:, :1]
    return fields.max(1), fields.argmax(1)


def _corners(boxes: Array, kind: str) -> Array:
    """Return a detector's boxes (candidates, 4) as left, top, right, bottom. kind: as `box` of the
    settings"""
    first, second = boxes[:, :2], boxes[:, 2:]
    if kind == "xyxy":
        return boxes
    low = first - 0.5 * second if kind == "cxcywh" else first
    return np.concatenate([low, low + second], 1)


def suppress(candidates: Objects, overlap: float, most: int) -> Array:
    """Choose among a detector's candidates the indices of at most `most` objects that no more
    probable one of their label overlaps: non-maximum suppression.

    candidates: objects, the most probable first
    overlap: intersection over union above which an object is dropped
    """
    low, high = candidates.boxes[:, :2], candidates.boxes[:, 2:]
    area = (high - low).prod(1)
    left = np.ones(len(area), bool)
    kept: list[int] = []
    while len(kept) < most and left.any():
        at = int(left.argmax())
        kept.append(at)
        inside = np.minimum(high, high[at]) - np.maximum(low, low[at])
        both = inside.clip(0).prod(1)
        # a box with a negative side has a negative area, and overlaps none
        close = (both > 0) & (both > overlap * (area + area[at] - both))
        left &= ~(close & (candidates.labels == candidates.labels[at]))
        left[at] = False
    return np.array(kept, np.int64)


def _in_image(contract: Contract, boxes: Array, sides: tuple[int, ...]) -> Array:
    """Return a detector's boxes (objects, 4) of the model's input in pixels of the image, within
    it."""
    image, (height, width) = contract.images, sides
    scale = np.array([image.width / width, image.height / height])
    start = np.zeros(2)
    if image.letterbox is not None:
        scale = np.full(2, scale.min())
        start = np.array(image.place((height, width))[1][::-1])
    corners = (boxes - np.tile(start, 2)) / np.tile(scale, 2)
    return np.asarray(corners.clip(0, np.tile([width, height], 2)), np.float32)


def answers(contract: Contract, values: Array, batch: Batch) -> list[dict[str, Any]]:
    """Return a detector's answers, {"objects"} per image, as object-detection does, of
    probabilities from detections.threshold on."""
    least = contract.candidates.threshold
    return [
        object_detection.describe(contract, objects(contract, row, sides, least))
        for row, sides in zip(values, batch.sides, strict=True)
    ]


def most_bytes(contract: Contract, image: Any) -> int:
    """Return the maximum bytes of a detector's answer: detections.most objects."""
    del image
    longest = max(14 * len(label) for label in contract.labels or ("",))
    return contract.candidates.most * (OBJECT + longest)


TASK = Task(
    name="detector",
    inputs=IMAGE_OF_FILE,
    output="",
    axes=(),
    metrics=object_detection.TASK.metrics,
    decode=unchanged,
    answers=answers,
    line=object_detection.line,
    arrays=None,
    sections=("labels",),
    optional=("detections",),
    bytes=most_bytes,
    multiline=True,
    gives=object_detection.TASK.gives,
    pipeline_tag=object_detection.TASK.name,
    of_file=True,
    not_in_browser=NOT_IN_BROWSER,
)
