"""image-classification: one label per image."""

from __future__ import annotations

from dataclasses import replace

from ...inputs.image import IMAGE
from .. import text_classification
from . import NOT_IN_BROWSER

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
    not_in_browser=NOT_IN_BROWSER,
)
