"""Counts of the calibration data, taken where they reach the first block.

validate counts the same by other code (validate/token_counts.py, which defines the digest) and
refuses a state whose walk read anything else than the recipe says.
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
    """Of one batch. rows: of the hidden states. tokens: those of them that are not padding. ids:
    the sha256 of each row's token ids; None of inputs that have none."""

    rows: int
    tokens: int
    ids: tuple[bytes, ...] | None


def of_batch(batch: Mapping[str, Tensor], hidden: Tensor, real: Tensor) -> Consumed:
    """hidden (batch, sequence, features) of the first block; real (batch, sequence) bool."""
    rows, sequence = len(hidden), hidden.shape[1]
    tokens = int(real[:rows, :sequence].sum())
    if IDS not in batch:
        return Consumed(rows, tokens, None)
    pairs = zip(batch[IDS][:rows, :sequence], real[:rows, :sequence], strict=True)
    kept = [ids[keep].long().numpy().tobytes() for ids, keep in pairs]
    return Consumed(rows, tokens, tuple(hashlib.sha256(ids).digest() for ids in kept))


def write(consumed: Iterable[Consumed], folder: Path) -> None:
    """folder/calibration.json: {rows, tokens, digest}; tokens and digest are null of images."""
    batches = list(consumed)
    ids = None if any(b.ids is None for b in batches) else [i for b in batches for i in b.ids or ()]
    document = {
        "rows": sum(b.rows for b in batches),
        "tokens": None if ids is None else sum(b.tokens for b in batches),
        "digest": None if ids is None else hashlib.sha256(b"".join(sorted(ids))).hexdigest(),
    }
    (folder / FILE).write_text(json.dumps(document), encoding="utf-8")
