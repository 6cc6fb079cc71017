"""image-classification: one label per image."""

from __future__ import annotations

from dataclasses import replace

from ...inputs.image import IMAGE
from .. import text_classification

TASK = replace(
    text_classification.TASK,
    name="image-classification",
    inputs=IMAGE,
    metrics={
        "accuracy": (("label",),),
        "top5_accuracy": (("label",),),
        "agreement": (),
        "f1": (("label",),),
        "cosine": (),
    },
    arrays=(),
    pairs_together=False,
    model="transformers:AutoModelForImageClassification",
    heads=("ForImageClassification", "ForImageClassificationWithTeacher"),
    not_in_browser="the page there reads texts, not images",
)
