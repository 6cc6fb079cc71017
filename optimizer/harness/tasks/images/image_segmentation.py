"""image-segmentation: a label for each pixel of an image (semantic segmentation)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ...inputs.batch import Array, Batch
from ...inputs.image import IMAGE
from ...inputs.image_file import read_sides
from ..task import Task, unchanged
from . import NOT_IN_BROWSER
from .base64_files import png
from .resize import resize

if TYPE_CHECKING:
    from ...contract import Contract

ROWS = 64  # of the image that are enlarged at once, for all labels


def label_map(logits: Array, sides: tuple[int, ...]) -> Array:
    """Segment an image: return the label id of each pixel, (height, width): the label with the
    largest logit.

    logits: (classes, rows, columns), enlarged to `sides`
    sides: (height, width) of the image in pixels
    """
    height, width = sides
    wide = np.empty((height, width), np.uint16)
    half = resize(logits, height, logits.shape[-1])
    for top in range(0, height, ROWS):
        part = half[:, top : top + ROWS]
        wide[top : top + ROWS] = resize(part, part.shape[1], width).argmax(0)
    return wide


def answers(contract: Contract, values: Iterable[Array], batch: Batch) -> list[dict[str, Any]]:
    """Return the answers of image segmentation, {"segments", "map"} per image.

    segments: {"label", "id", "share"} of each label in the image, in order of ids; `share` of the
        image's pixels.
    map: PNG in base64 of the image's size, grey, 8 bits or for more than 256 labels 16, whose
        values are label ids.
    """
    labels = contract.labels or ()
    dtype = np.uint8 if len(labels) <= 256 else np.uint16
    rows = []
    for logits, sides in zip(values, batch.sides, strict=True):
        ids = label_map(logits, sides)
        present, counts = np.unique(ids, return_counts=True)
        segments = [
            {"label": labels[int(i)], "id": int(i), "share": float(c / ids.size)}
            for i, c in zip(present, counts, strict=True)
        ]
        rows.append({"segments": segments, "map": png(ids.astype(dtype))})
    return rows


def most_bytes(contract: Contract, image: Any) -> int:
    """Return the maximum bytes of an answer of image segmentation: a PNG that does not compress, in
    base64."""
    height, width = read_sides(image)
    labels = contract.labels or ()
    pixels = height * width * (1 if len(labels) <= 256 else 2)
    return pixels * 3 // 2 + 4096 + sum(14 * len(label) + 160 for label in labels)


def line(answer: Mapping[str, Any]) -> str:
    """Return an answer of image segmentation as text for a person."""
    ordered = sorted(answer["segments"], key=lambda one: -one["share"])
    return "  ".join(f"{one['label']} {one['share']:.1%}" for one in ordered)


TASK = Task(
    name="image-segmentation",
    inputs=IMAGE,
    output="logits",
    axes=("batch", "classes", "rows", "columns"),
    metrics={"miou": (("mask",),), "agreement": ()},
    decode=unchanged,
    answers=answers,
    line=line,
    sections=("labels",),
    bytes=most_bytes,
    gives="a label for each pixel",
    model="transformers:AutoModelForSemanticSegmentation",
    heads=("ForSemanticSegmentation",),
    not_in_browser=NOT_IN_BROWSER,
)
