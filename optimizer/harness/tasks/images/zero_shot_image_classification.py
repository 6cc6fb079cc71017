"""zero-shot-image-classification: the one of several labels whose text fits an image best.

The model encodes images, as the vision model of CLIP does. The vectors of the texts of the recipe's
labels are weights of its last layer, so that an image costs the same for any number of labels.
A model whose contract has `label_texts` also outputs the image's vector, which is compared with
those of the labels of a request (request_labels.py). Scores are those of transformers' pipeline: a
softmax over the labels (CLIP), or a sigmoid for each (SigLIP).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...inputs.batch import Array, Batch
from ..text_classification import activated, softmax
from . import image_classification
from .request_labels import LABELLED_IMAGE, LabelledImage

if TYPE_CHECKING:
    from ...contract import Contract

VECTOR = "image_embeds"
"""Output with the vector of unit length of an image, of a model whose contract has label_texts."""


def of_request(
    contract: Contract, values: Array, outputs: Mapping[str, Array], batch: Batch
) -> Array:
    """Classify images by a request's labels: return logits with those of these labels, (batch, most
    labels of an image).

    Images with fewer labels are padded with minus infinity.

    values: logits of the recipe's labels, (batch, labels)
    outputs: outputs of the model by name, which include the image's vector
    batch: images, some of them LabelledImage
    """
    del contract
    if not any(isinstance(one, LabelledImage) for one in batch.inputs):
        return values
    rows = [
        one.weights @ np.asarray(vector, np.float32) + np.float32(one.bias)
        if isinstance(one, LabelledImage)
        else own
        for one, own, vector in zip(batch.inputs, values, outputs[VECTOR], strict=True)
    ]
    logits = np.full((len(rows), max(map(len, rows))), -np.inf, np.float32)
    for padded, row in zip(logits, rows, strict=True):
        padded[: len(row)] = row
    return logits


def answers(contract: Contract, values: Array, batch: Batch) -> list[dict[str, Any]]:
    """Return an image's answer, {"label", "score", "scores"}: the likeliest label, its score and
    those of all."""
    scores = softmax(values) if contract.activation is None else activated(contract, values)
    results = []
    for one, logits, row in zip(batch.inputs, values, scores, strict=True):
        labels = one.labels if isinstance(one, LabelledImage) else contract.labels or ()
        each = dict(zip(labels, map(float, row[: len(labels)]), strict=True))
        best = labels[int(logits.argmax())]
        results.append({"label": best, "score": each[best], "scores": each})
    return results


def tensors(contract: Contract) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return {field of an image's answer: (dtype, shape per input)} for servers that send
    arrays."""
    del contract
    return {"label": ("object", ()), "score": ("float32", ())}


TASK = replace(
    image_classification.TASK,
    name="zero-shot-image-classification",
    inputs=LABELLED_IMAGE,
    metrics={
        **image_classification.TASK.metrics,
        "recall_at_1": (("label",),),
        "recall_at_5": (("label",),),
    },
    answers=answers,
    tensors=tensors,
    of_request=of_request,
    optional=("label_texts",),
    names_labels=True,
    headless=True,
    model="transformers:AutoModelForZeroShotImageClassification",
    heads=(),
)
