"""One label per text."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..contract import Contract
from .batch import Array, Batch


def decode(contract: Contract, logits: Array, mask: Array) -> Array:
    """logits (batch, labels), as they are."""
    del contract, mask
    return logits


def softmax(logits: Array) -> Array:
    """Probabilities along the last axis; exact under adding a constant to all logits."""
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))


def answers(contract: Contract, values: Array, batch: Batch) -> list[dict[str, Any]]:
    """{"label", "score", "scores"}: the likeliest label, its probability, and every label's.

    A model with a single label is a regression: {"label", "value"}.
    """
    del batch
    labels = contract.labels or ()
    if len(labels) == 1:
        return [{"label": labels[0], "value": float(row[0])} for row in values]
    made = []
    for row in softmax(values):
        best = int(row.argmax())
        scores = {label: float(p) for label, p in zip(labels, row, strict=True)}
        made.append({"label": labels[best], "score": float(row[best]), "scores": scores})
    return made
