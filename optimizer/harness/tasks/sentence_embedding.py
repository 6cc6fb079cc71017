"""One vector per text: hidden states pooled over the tokens that are not padding."""

from __future__ import annotations

import numpy as np

from ..contract import Contract
from .batch import Array, Batch

SMALLEST_NORM = 1e-12  # torch.nn.functional.normalize's eps


def decode(contract: Contract, hidden: Array, mask: Array) -> Array:
    """hidden (batch, sequence, width), mask (batch, sequence) bool -> (batch, width).

    Padding is on the right and the sum runs over the sequence in order, so more padding adds
    exact zeros at the end: the result does not change in any bit.
    """
    if contract.pooling == "cls":
        pooled = hidden[:, 0]
    else:
        total = np.where(mask[..., None], hidden, np.float32(0)).sum(axis=1)
        count = np.maximum(mask.sum(axis=1, keepdims=True), 1).astype(np.float32)
        pooled = total / count
    if contract.normalize:
        norm = np.sqrt(np.square(pooled).sum(axis=1, keepdims=True))
        pooled = pooled / np.maximum(norm, np.float32(SMALLEST_NORM))
    return np.ascontiguousarray(pooled)


def answers(contract: Contract, values: Array, batch: Batch) -> list[dict[str, list[float]]]:
    """{"embedding": floats} per text."""
    del contract, batch
    return [{"embedding": [float(x) for x in row]} for row in values]
