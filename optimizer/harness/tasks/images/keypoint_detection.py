"""keypoint-detection: the keypoints, such as joints, of the person or object in each box of an
image, in pixels of the image as it was given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...inputs.batch import Array, Batch
from ...inputs.boxes.boxed_image import BOXED_IMAGE, BOXES
from ..task import Task, unchanged
from . import NOT_IN_BROWSER
from .heatmaps import keypoints

if TYPE_CHECKING:
    from ...contract import Contract

KEYPOINT = 256  # maximum bytes of a keypoint in JSON within JSON, besides its label


def answers(contract: Contract, values: Array, batch: Batch) -> list[dict[str, Any]]:
    """Return the answers of keypoint detection, {"box", "score", "keypoints"} per box, for `merge`.

    box: [left, top, width, height] that the keypoints were looked for in.
    score: mean of the keypoints' scores.
    keypoints: {"label", "score", "x", "y"} each, in order of label ids; `score` is the largest
        value of the keypoint's heatmap.
    """
    settings, labels = contract.images, contract.labels or ()
    rows = []
    for heatmaps, crop in zip(values, batch.encodings, strict=True):
        places, scores = keypoints(heatmaps, crop.box, settings.height, settings.width)
        each = zip(labels, scores.tolist(), places.tolist(), strict=True)
        named = [{"label": n, "score": s, "x": x, "y": y} for n, s, (x, y) in each]
        rows.append({"box": list(crop.box), "score": float(scores.mean()), "keypoints": named})
    return rows


def merge(contract: Contract, boxes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the answers of keypoint detection: {"poses": the answers to the boxes of an image, in
    their order}."""
    del contract
    return {"poses": [dict(one) for one in boxes]}


def most_bytes(contract: Contract, image: Any) -> int:
    """Return the maximum bytes of an answer of keypoint detection: BOXES boxes."""
    del image
    return BOXES * sum(KEYPOINT + 14 * len(label) for label in contract.labels or ())


def line(answer: Mapping[str, Any]) -> str:
    """Return an answer of keypoint detection as text for a person."""
    lines = []
    for pose in answer["poses"]:
        box = ", ".join(f"{side:g}" for side in pose["box"])
        places = (f"{k['label']} {k['x']:.1f},{k['y']:.1f}" for k in pose["keypoints"])
        lines.append(f"{pose['score']:.4f} [{box}]  {'  '.join(places)}")
    return "\n".join(lines)


TASK = Task(
    name="keypoint-detection",
    inputs=BOXED_IMAGE,
    output="heatmaps",
    axes=("batch", "keypoints", "rows", "columns"),
    metrics={"oks_map": (("keypoints",),), "pck": (("keypoints",),), "cosine": ()},
    decode=unchanged,
    answers=answers,
    merge=merge,
    line=line,
    sections=("labels",),
    pairs_together=True,
    bytes=most_bytes,
    multiline=True,
    gives="places of the keypoints in each box, with a score",
    model="transformers:AutoModelForPoseEstimation",
    heads=("ForPoseEstimation",),
    not_in_browser=NOT_IN_BROWSER,
)
