"""Count the calibration data that reach the first block.

validate counts the same by independent code (validate/token_counts.py, which defines the digest)
and refuses a state whose walk read other data than the recipe's.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

FILE = "calibration.json"
IDS = "input_ids"


@dataclass(frozen=True)
class Consumed:
    """Counts of one calibration batch that compress has read.

    rows: rows of the hidden states
    tokens: tokens that are not padding
    ids: sha256 of each row's token ids; None for inputs without token ids
    """

    rows: int
    tokens: int
    ids: tuple[bytes, ...] | None


def count_batch(batch: Mapping[str, Tensor], hidden: Tensor, real: Tensor) -> Consumed:
    """Count a batch by the hidden states (batch, sequence, features) of the first block, and real
    (batch, sequence) bool."""
    rows, sequence = len(hidden), hidden.shape[1] if hidden.ndim > 1 else 1
    tokens = int(real[:rows, :sequence].sum())
    if IDS not in batch:
        return Consumed(rows, tokens, None)
    pairs = zip(batch[IDS][:rows, :sequence], real[:rows, :sequence], strict=True)
    kept = [ids[keep].long().numpy().tobytes() for ids, keep in pairs]
    return Consumed(rows, tokens, tuple(hashlib.sha256(ids).digest() for ids in kept))


def write(consumed: Iterable[Consumed], folder: Path) -> None:
    """Write folder/calibration.json: {rows, tokens, digest}; for images tokens and digest are
    null."""
    batches = list(consumed)
    ids = None if any(b.ids is None for b in batches) else [i for b in batches for i in b.ids or ()]
    document = {
        "rows": sum(b.rows for b in batches),
        "tokens": None if ids is None else sum(b.tokens for b in batches),
        "digest": None if ids is None else hashlib.sha256(b"".join(sorted(ids))).hexdigest(),
    }
    (folder / FILE).write_text(json.dumps(document), encoding="utf-8")
