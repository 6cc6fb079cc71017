"""Which held-out inputs the ledger compares on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from optimizer.data.datasets import Sample
from optimizer.foundation.errors import DataError
from optimizer.harness.inputs.kind import InputKind
from optimizer.harness.inputs.text import TEXT

LEDGER_TEXTS = 32


def ledger_texts(rows: Sequence[Sample], kind: InputKind = TEXT) -> list[Any]:
    """LEDGER_TEXTS inputs of all sizes, evenly through the rows sorted by size."""
    texts = sorted(dict.fromkeys(r.input for r in rows), key=kind.extent)
    if len(texts) < 3:
        raise DataError(
            f"{len(texts)} different {kind.name}s",
            where="validate.data",
            accepted="three or more, so that padding and batches can be compared",
        )
    at = np.unique(np.linspace(0, len(texts) - 1, LEDGER_TEXTS).round().astype(int))
    return [texts[i] for i in at]
