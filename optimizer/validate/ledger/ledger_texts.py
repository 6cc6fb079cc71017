"""Which held-out texts are the ledger's inputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optimizer.errors import DataError
from optimizer.load.datasets import Sample

LEDGER_TEXTS = 32


def ledger_texts(rows: Sequence[Sample]) -> list[str]:
    """LEDGER_TEXTS texts of all lengths, evenly through the rows sorted by length."""
    texts = sorted(dict.fromkeys(r.text for r in rows), key=len)
    if len(texts) < 3:
        raise DataError(
            f"{len(texts)} different texts",
            where="validate.data",
            accepted="three or more, so that padding and batches can be compared",
        )
    at = np.unique(np.linspace(0, len(texts) - 1, LEDGER_TEXTS).round().astype(int))
    return [texts[i] for i in at]
