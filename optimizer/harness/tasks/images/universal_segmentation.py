"""universal-segmentation: a label for each pixel, from queries that have a mask each (Mask2Former).

    masks     enlarged to SIDE x SIDE, then a sigmoid each: m[q, pixel]
    labels    softmax over the labels and "no object": p[q, label]
    scores    sum over q of p[q, label] * m[q, pixel]; a pixel's label has the largest score

as `post_process_semantic_segmentation` of transformers' processor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...inputs.batch import Array, Batch
from ..text_classification import sigmoid, softmax
from . import image_segmentation
from .resize import resize

if TYPE_CHECKING:
    from ...contract import Contract

SIDE = 384  # transformers enlarges masks to it, whatever the size of the model's images
MASKS: Mapping[str, tuple[str, ...]] = {
    "masks_queries_logits": ("batch", "queries", "rows", "columns")
}


def split(contract: Contract, values: Array) -> tuple[Array, Array]:
    """Split the segmentation model's joined outputs of an image into (logits (queries, labels + 1),
    masks (queries, rows, columns))."""
    ((rows, columns),) = (o.axes[2:] for o in contract.outputs if o.name in MASKS)
    pixels = int(rows) * int(columns)
    masks = values[:, -pixels:].reshape(len(values), int(rows), int(columns))
    return values[:, :-pixels], masks


def label_scores(contract: Contract, values: Array) -> Array:
    """Segment an image: return the score of each label at each pixel, (labels, SIDE, SIDE).

    values: (queries, labels + 1 + pixels): logits, then the mask, row by row
    """
    logits, masks = split(contract, values)
    wide = np.stack([sigmoid(m).astype(np.float32) for m in resize(masks, SIDE, SIDE)])
    labels = softmax(logits)[:, :-1].astype(np.float32)
    scores: Array = labels.T @ wide.reshape(len(wide), -1)
    return scores.reshape(-1, SIDE, SIDE)


def answers(contract: Contract, values: Array, batch: Batch) -> list[dict[str, Any]]:
    """Return the answers of universal segmentation, {"segments", "map"} per image, as
    image-segmentation does."""
    each = (label_scores(contract, row) for row in values)
    return image_segmentation.answers(contract, each, batch)


TASK = replace(
    image_segmentation.TASK,
    name="universal-segmentation",
    output="class_queries_logits",
    axes=("batch", "queries", "classes"),
    beside=MASKS,
    answers=answers,
    pipeline_tag=image_segmentation.TASK.name,
    model="transformers:AutoModelForUniversalSegmentation",
    heads=("ForUniversalSegmentation",),
)
