"""object-detection: labelled boxes of an image, in pixels of the image as it was given.

Each of the n queries of a model has a logit per label, and perhaps one more:

    labels        each logit has a sigmoid; the n most probable pairs of query and label are the
                  objects (RT-DETR)
    labels + 1    the last logit is "no object": a softmax; each query is an object with its most
                  probable label (DETR, YOLOS)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...inputs.batch import Array, Batch
from ...inputs.image import IMAGE
from ..task import Task, unchanged
from ..text_classification import sigmoid, softmax
from . import NOT_IN_BROWSER

if TYPE_CHECKING:
    from ...contract import Contract

THRESHOLD = 0.5  # an object's probability is above it, as in transformers' pipeline
CORNERS = ("xmin", "ymin", "xmax", "ymax")
BOX = len(CORNERS)
OBJECT = 256  # maximum bytes of an object in JSON within JSON, besides its label


@dataclass(frozen=True)
class Objects:
    """Objects detected in one image.

    scores: probabilities (objects,).
    labels: label ids (objects,).
    boxes: (objects, 4), left, top, right and bottom in pixels of the image.
    """

    scores: Array
    labels: Array
    boxes: Array

    def above(self, threshold: float) -> Objects:
        """Return the detected objects whose probability is above `threshold`."""
        keep = self.scores > threshold
        return Objects(self.scores[keep], self.labels[keep], self.boxes[keep])


def objects(contract: Contract, values: Array, sides: tuple[int, ...]) -> Objects:
    """Return the objects detected in one image, whatever their probability.

    values: (queries, classes + 4): logits, then the box's centre and size from 0 to 1.
    sides: height and width of the image.
    """
    logits, boxes = values[:, :-BOX], values[:, -BOX:]
    centre, size = boxes[:, :2], boxes[:, 2:]
    corners = np.concatenate([centre - 0.5 * size, centre + 0.5 * size], -1)
    height, width = sides
    corners = corners * np.array([width, height, width, height], np.float32)
    count = len(contract.labels or ())
    if logits.shape[-1] == count:
        scores = sigmoid(logits).astype(np.float32).ravel()
        best = np.argsort(-scores, kind="stable")[: len(logits)]
        return Objects(scores[best], best % count, corners[best // count])
    scores = softmax(logits)[:, :-1]
    return Objects(scores.max(-1), scores.argmax(-1), corners)


def answers(contract: Contract, values: Array, batch: Batch) -> list[dict[str, Any]]:
    """Return the answers of object detection, {"objects"} per image.

    objects: {"score", "label", "box": {"xmin", "ymin", "xmax", "ymax"}} each, in whole pixels
    """
    rows = zip(values, batch.sides, strict=True)
    return [describe(contract, objects(contract, *row).above(THRESHOLD)) for row in rows]


def describe(contract: Contract, chosen: Objects) -> dict[str, Any]:
    """Return {"objects"} of one image's chosen objects, as `answers` does."""
    labels = contract.labels or ()
    each = zip(chosen.scores, chosen.labels, chosen.boxes, strict=True)
    return {
        "objects": [
            {
                "score": float(score),
                "label": labels[int(label)],
                "box": dict(zip(CORNERS, map(int, box), strict=True)),
            }
            for score, label, box in each
        ]
    }


def most_bytes(contract: Contract, image: Any) -> int:
    """Return the maximum bytes of an answer of object detection: every query is an object."""
    del image
    (queries,) = (int(o.axes[1]) for o in contract.outputs if o.name == TASK.output)
    longest = max(14 * len(label) for label in contract.labels or ("",))
    return queries * (OBJECT + longest)


def line(answer: Mapping[str, Any]) -> str:
    """Return an answer of object detection as text for a person."""
    shown = (
        f"{one['label']} {one['score']:.4f} [{', '.join(str(one['box'][c]) for c in CORNERS)}]"
        for one in answer["objects"]
    )
    return "\n".join(shown) or "-"


TASK = Task(
    name="object-detection",
    inputs=IMAGE,
    output="logits",
    axes=("batch", "queries", "classes"),
    beside={"pred_boxes": ("batch", "queries", "corners")},
    metrics={"map": (("objects",),), "map50": (("objects",),), "agreement": ()},
    decode=unchanged,
    answers=answers,
    line=line,
    sections=("labels",),
    bytes=most_bytes,
    multiline=True,
    gives="boxes of objects, with a label and a probability",
    model="transformers:AutoModelForObjectDetection",
    heads=("ForObjectDetection",),
    not_in_browser=NOT_IN_BROWSER,
)
