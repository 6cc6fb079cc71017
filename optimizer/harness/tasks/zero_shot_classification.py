"""zero-shot-classification: candidate labels of a text, by a model of natural language inference.

The model reads the text with a hypothesis for each label, such as "This example is sport." As
transformers' pipeline does, scores are a softmax of the logits of entailment over the labels; with
multi_label, and for a single label, of contradiction and entailment for each label by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..inputs.batch import Array, Batch
from ..inputs.hypothesis import HYPOTHESIS
from .task import Task, unchanged
from .text_classification import softmax

if TYPE_CHECKING:
    from ..contract import Contract


def answers(contract: Contract, values: Array, batch: Batch) -> list[dict[str, Any]]:
    """Answer zero-shot classification: return {"label", "number", "entailment", "contradiction",
    "alone"} per claim, for `merge`.

    number: index of the label in the request
    entailment, contradiction: logits
    alone: True if each label is judged by itself
    """
    entailment = contract.choice.entailment
    contradiction = -1 if entailment == 0 else 0
    return [
        {
            "label": claim.label,
            "number": claim.number,
            "entailment": float(row[entailment]),
            "contradiction": float(row[contradiction]),
            "alone": claim.settings.multi_label or len(claim.settings.candidate_labels) == 1,
        }
        for claim, row in zip(batch.inputs, values, strict=True)
    ]


def merge(contract: Contract, claims: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the claims on a text to its answer: {"labels", "scores"}, the likeliest label first."""
    del contract
    ordered = sorted(claims, key=lambda claim: int(claim["number"]))
    logits = np.array([[c["contradiction"], c["entailment"]] for c in ordered], np.float32)
    scores = softmax(logits)[:, 1] if ordered[0]["alone"] else softmax(logits[:, 1])
    order = np.argsort(scores, kind="stable")[::-1]
    return {
        "labels": [ordered[i]["label"] for i in order],
        "scores": [float(scores[i]) for i in order],
    }


def weigh_claims(claims: Sequence[Mapping[str, Any]]) -> Array:
    """Rank a text's labels: return a number per label of a request, in its order, by which labels
    are ranked.

    It is the logit of entailment, minus that of contradiction if labels are judged separately.
    """
    ordered = sorted(claims, key=lambda claim: int(claim["number"]))
    against = [claim["contradiction"] if claim["alone"] else 0.0 for claim in ordered]
    numbers = np.array([claim["entailment"] for claim in ordered]) - np.array(against)
    return np.asarray(numbers, np.float32)


def line(answer: Mapping[str, Any]) -> str:
    """Write an answer of zero-shot classification in one line for a person: each candidate label
    with its probability."""
    both = zip(answer["labels"], answer["scores"], strict=True)
    return "  ".join(f"{label} {score:.4f}" for label, score in both)


TASK = Task(
    name="zero-shot-classification",
    inputs=HYPOTHESIS,
    output="logits",
    axes=("batch", "labels"),
    metrics={"accuracy": (("label",),), "f1": (("label",),), "cosine": ()},
    decode=unchanged,
    answers=answers,
    merge=merge,
    line=line,
    arrays=("token_type_ids",),
    sections=("labels",),
    optional=("zero_shot",),
    pairs_together=True,
    model="transformers:AutoModelForSequenceClassification",
    not_in_browser="the page has no field for the labels of a request",
)
