"""Find the outputs that a model gave an input, among those of whole batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from optimizer.harness import tasks
from optimizer.harness.inputs.batch import Array, Batch
from optimizer.validate.materials import Materials

Run = tuple[Mapping[str, Array], Array]
"""The input arrays of a batch, and the task's output for it."""


def list_part_rows(m: Materials, value: Any, runs: Sequence[Run]) -> tuple[Batch, Array | None]:
    """Return (the parts of one input as a batch, their outputs (parts, ...) from earlier runs);
    None in place of the outputs where a part has none.

    value: one input of the task
    runs: earlier batches with their outputs
    """
    kind = tasks.look_up(m.contract).inputs
    (encoded,) = kind.encode(m.contract, m.encoder, [value])
    rows = [run_row(kind.collate(m.contract, [part]), runs) for part in encoded.parts]
    own = [row for row in rows if row is not None]
    whole = np.stack(own) if len(own) == len(rows) else None
    return kind.collate(m.contract, encoded.parts), whole


def run_row(alone: Batch, runs: Sequence[Run]) -> Array | None:
    """Return the output, without padding, of the first row in `runs` whose input equals that of
    `alone`, a batch of one; None where there is none."""
    for arrays, output in runs:
        real = np.asarray(arrays["attention_mask"]) if alone.real.ndim > 1 else None
        for i, out in enumerate(output):
            size = None if real is None else int(real[i].sum())
            if all(np.array_equal(a[i][:size], alone[n][0]) for n, a in arrays.items()):
                per_position = size is not None and out.ndim == 2
                return np.ascontiguousarray(out[:size] if per_position else out)
    return None
