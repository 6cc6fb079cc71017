"""Check that padding changes no output of an encoder's graph.

 1. outputs(tokens, padding holds a) = outputs(tokens, padding holds b)
 2. outputs(tokens, padding)         = outputs(tokens), but for rounding

A decoder's classifier finds its last token by the id of padding, so law 1 does not apply to it.

Both sides of 1 have one shape and thus the same kernels, and hidden positions are multiplied by 0,
or by 2^-127 where a kernel's exp gives no less, so rounding needs no allowance. An encoder that
convolves, mixes or averages over all positions fails 1, in transformers too. One that depends on
the amount of padding fails 2.
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
NOTHING = 2.0**-64  # relative to the largest value: far below rounding, far above 2^-127


def check_padding(
    runner: OrtRunner,
    batch: Arrays,
    values: int | None,
    limits: Mapping[str, float],
    usual: Mapping[str, float],
) -> None:
    """Check the model before export: raise CheckpointError where an output breaks law 1 or 2; needs
    a mask with padding.

    batch: inputs that check.draw_inputs drew
    values: size of the vocabulary; None leaves out law 1
    limits: {output: maximum relative L2 of an example} for law 2
    usual: {output: mean square of a value}, see tolerance.lengths
    """
    if MASK not in batch or batch[MASK].all():
        return
    real = batch[MASK].astype(bool)
    before = runner.infer(batch)
    if values is not None:
        drawn = np.random.default_rng(0).integers(0, values, real.shape)
        others = {**batch, IDS: np.where(real, batch[IDS], drawn).astype(batch[IDS].dtype)}
        for name, value in runner.infer(others).items():
            one, other = _real(before[name], real), _real(value, real)
            least = NOTHING * np.nanmax(np.abs(one), initial=0)
            if not np.allclose(one, other, rtol=0, atol=least, equal_nan=True):
                (moved,) = lengths([(other, one)], usual[name])
                raise _broken(name, moved, "padding holds other tokens")
    for row in np.flatnonzero(~real.all(axis=1)):
        length = int(real[row].sum())
        alone = runner.infer({n: a[row : row + 1, :length] for n, a in batch.items()})
        for name, value in alone.items():
            one = _real(before[name][row : row + 1], real[row : row + 1])
            other = _real(value, real[row : row + 1, :length])
            (moved,) = lengths([(other, one)], usual[name])
            if not moved <= limits[name]:
                raise _broken(name, moved, "padding is removed")


def _real(value: Array, real: Array) -> Array:
    """Select the tokens of the exported graph's output `value` that are not padding, (tokens,
    width), in float64."""
    of_tokens = value.ndim > 2 and value.shape[:2] == real.shape
    return (value[real] if of_tokens else value).astype(np.float64)


def _broken(name: str, moved: float, when: str) -> CheckpointError:
    return CheckpointError(
        f"{name} of the same tokens changes by {moved:.2g} (relative L2) when {when}, so the "
        "answer to a text depends on the other texts of its batch",
        where="model.source",
        accepted="encoders whose attention mask hides padding from every output",
        fix="Take a model of another architecture: this one does so in transformers too.",
    )
