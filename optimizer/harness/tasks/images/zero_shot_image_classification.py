"""zero-shot-image-classification: the one of a recipe's labels whose text fits an image best.

The model is the side of images of a pair such as CLIP. The vectors of the labels' texts are weights
of its last layer, so that an image costs the same for any number of labels. Scores are those of
transformers' pipeline: a softmax over the labels (CLIP), or a sigmoid for each (SigLIP).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...inputs.batch import Array, Batch
from ..text_classification import activated, softmax
from . import image_classification

if TYPE_CHECKING:
    from ...contract import Contract


def answers(contract: Contract, values: Array, batch: Batch) -> list[dict[str, Any]]:
    """Return {"label", "score", "scores"}: the likeliest label, its score and those of all."""
    del batch
    labels = contract.labels or ()
    scores = softmax(values) if contract.activation is None else activated(contract, values)
    each = [dict(zip(labels, map(float, row), strict=True)) for row in scores]
    best = values.argmax(axis=1)
    return [
        {"label": labels[i], "score": row[labels[i]], "scores": row}
        for i, row in zip(best, each, strict=True)
    ]


def tensors(contract: Contract) -> dict[str, tuple[str, tuple[int, ...]]]:
    del contract
    return {"label": ("object", ()), "score": ("float32", ())}


TASK = replace(
    image_classification.TASK,
    name="zero-shot-image-classification",
    answers=answers,
    tensors=tensors,
    names_labels=True,
    headless=True,
    model="transformers:AutoModelForZeroShotImageClassification",
    heads=(),
)
