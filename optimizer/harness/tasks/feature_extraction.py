"""Every token's hidden state."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..contract import Contract
from .batch import Array, Batch


def decode(contract: Contract, hidden: Array, mask: Array) -> Array:
    """hidden (batch, sequence, width), zero where padded."""
    del contract
    return np.where(mask[..., None], hidden, np.float32(0))


def answers(contract: Contract, values: Array, batch: Batch) -> list[dict[str, Any]]:
    """{"hidden_states": a list of (tokens, width) floats} per text, padding left out."""
    del contract
    kept = [values[i][: len(e.ids)] for i, e in enumerate(batch.encodings)]
    return [{"hidden_states": [[float(x) for x in row] for row in rows]} for rows in kept]
