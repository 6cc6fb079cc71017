"""Padding reaches no answer, so that a text beside a longer one is answered as alone.

 1. outputs(tokens, padding holds a) = outputs(tokens, padding holds b)
 2. outputs(tokens, padding)         = outputs(tokens), but for rounding

Both of 1 are of one shape, so that the kernels are the same, and what a mask leaves out is
multiplied by 0, or by 2^-127 where a kernel's exp gives no less: there is no rounding to allow for.
An encoder that convolves, mixes or averages over all positions differs, in transformers as in its
graph. One that goes by how much padding there is, and not by what it holds, differs in 2.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from optimizer.export.reference import Arrays
from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.rounding.tolerance import lengths
from optimizer.harness.inputs.batch import Array
from optimizer.harness.runtimes.ort.run import OrtRunner

IDS, MASK = "input_ids", "attention_mask"
NOTHING = 2.0**-64  # of the largest value: far below rounding, and far above 2^-127 of another's


def check_padding(
    runner: OrtRunner,
    batch: Arrays,
    values: int,
    limits: Mapping[str, float],
    usual: Mapping[str, float],
) -> None:
    """Raise CheckpointError when an output of an encoder's graph differs with its padding.

    batch: as check.random_inputs draws it. values: how many tokens there are. limits: of each
    output, relative L2 of an example beyond which law 2 is broken; usual: the mean square of a
    value, see tolerance.lengths. Inputs without a mask, or that have no padding, tell nothing.
    """
    if MASK not in batch or batch[MASK].all():
        return
    real = batch[MASK].astype(bool)
    drawn = np.random.default_rng(0).integers(0, values, real.shape)
    others = {**batch, IDS: np.where(real, batch[IDS], drawn).astype(batch[IDS].dtype)}
    before, after = runner.infer(batch), runner.infer(others)
    for name, value in before.items():
        one, other = _real(value, real), _real(after[name], real)
        least = NOTHING * np.nanmax(np.abs(one), initial=0)
        if not np.allclose(one, other, rtol=0, atol=least, equal_nan=True):
            (moved,) = lengths([(other, one)], usual[name])
            raise _reached(name, moved, "padding holds other tokens")
    for row in np.flatnonzero(~real.all(axis=1)):
        length = int(real[row].sum())
        alone = runner.infer({n: a[row : row + 1, :length] for n, a in batch.items()})
        for name, value in alone.items():
            one = _real(before[name][row : row + 1], real[row : row + 1])
            other = _real(value, real[row : row + 1, :length])
            (moved,) = lengths([(other, one)], usual[name])
            if not moved <= limits[name]:
                raise _reached(name, moved, "there is no padding")


def _real(value: Array, real: Array) -> Array:
    """In float64, of (batch, sequence, width) the tokens that are not padding, (tokens, width)."""
    of_tokens = value.ndim > 2 and value.shape[:2] == real.shape
    return (value[real] if of_tokens else value).astype(np.float64)


def _reached(name: str, moved: float, when: str) -> CheckpointError:
    return CheckpointError(
        f"{name} of the same tokens moves by {moved:.2g} of itself when {when}, so a text is "
        "answered otherwise beside a longer one than alone",
        where="model.source",
        accepted="encoders whose attention mask leaves padding out of everything",
        fix="Take a model of another architecture: this one does so in transformers too.",
    )
