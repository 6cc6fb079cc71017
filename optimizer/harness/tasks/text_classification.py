"""text-classification: one label per text, or several, or a number per label."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..inputs.batch import Array, Batch
from ..inputs.text import TEXT
from .task import Task, unchanged

if TYPE_CHECKING:
    from ..contract import Contract


THRESHOLD = 0.5  # least probability of a label of a multi-label model, without thresholds


def softmax(logits: Array) -> Array:
    """Compute the answer's probabilities of labels from logits along the last axis, float32."""
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))


def sigmoid(logits: Array) -> Array:
    """Compute the answer's probability of each label by itself from its logit, float64."""
    small = np.exp(-np.abs(logits.astype(np.float64)))  # never overflows
    return np.asarray(np.where(logits < 0, small, 1.0) / (1.0 + small))


def activated(contract: Contract, values: Array) -> Array:
    """Return the contract's activation of a classifier's logits, `values`, float32; `values`
    themselves without one."""
    if contract.activation != "sigmoid":
        return values
    return sigmoid(values).astype(np.float32)


def choose_labels(contract: Contract, scores: Array) -> Array:
    """Return the labels of each text of a multi-label model, (batch, labels) bool: those whose
    probability in `scores` is at least their threshold."""
    least = contract.thresholds or (THRESHOLD,) * scores.shape[-1]
    return np.asarray(scores >= np.array(least, np.float32))


def answers(contract: Contract, values: Array, batch: Batch) -> list[dict[str, Any]]:
    """Return an answer per text: {"label", "score", "scores"}, the top label, its probability and
    all probabilities.

    A model with a single label answers {"label", "value"}: the activation of its logit; a
    multi-label model {"labels", "scores"}: the labels above their thresholds, and all
    probabilities; a regression with several outputs {"values"}: a number per label.
    """
    del batch
    labels = contract.labels or ()
    if len(labels) == 1:
        return [{"label": labels[0], "value": float(v)} for (v,) in activated(contract, values)]
    if contract.activation is not None:
        numbers = activated(contract, values)
        each = [dict(zip(labels, map(float, row), strict=True)) for row in numbers]
        if not contract.multi_label:
            return [{"values": row} for row in each]
        kept = choose_labels(contract, numbers)
        return [
            {"labels": [labels[i] for i in np.flatnonzero(k)], "scores": row}
            for row, k in zip(each, kept, strict=True)
        ]
    rows = []
    for row in softmax(values):
        best = int(row.argmax())
        scores = {label: float(p) for label, p in zip(labels, row, strict=True)}
        rows.append({"label": labels[best], "score": float(row[best]), "scores": scores})
    return rows


def tensors(contract: Contract) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return {field of a classifier's answer: (dtype, shape per input)} for servers that send
    arrays."""
    if contract.activation is not None and len(contract.labels or ()) > 1:
        return {}
    number = "value" if len(contract.labels or ()) == 1 else "score"
    return {"label": ("object", ()), number: ("float32", ())}


def line(answer: Mapping[str, Any]) -> str:
    """Write a classifier's answer in one line for a person: the label with its probability."""
    if "values" in answer:
        return "  ".join(f"{label} {value:.4f}" for label, value in answer["values"].items())
    if "labels" in answer:
        scores = answer["scores"]
        return "  ".join(f"{label} {scores[label]:.4f}" for label in answer["labels"]) or "-"
    value = answer.get("score", answer.get("value"))
    return f"{answer['label']}  {value:.4f}"


TASK = Task(
    name="text-classification",
    inputs=TEXT,
    output="logits",
    axes=("batch", "labels"),
    metrics={
        "accuracy": (("label",),),
        "f1": (("label",), ("labels",)),
        "micro_f1": (("labels",),),
        "spearman": (("score",),),
        "cosine": (),
    },
    decode=unchanged,
    answers=answers,
    line=line,
    tensors=tensors,
    arrays=("token_type_ids",),
    sections=("labels",),
    pairs_together=True,
    model="transformers:AutoModelForSequenceClassification",
    heads=("ForSequenceClassification",),
    not_in_browser="",
)
