"""What padding holds reaches no answer, so that a text beside a longer one is answered as alone.

    outputs(tokens, padding holds a) = outputs(tokens, padding holds b)

Both are of one shape, so that the kernels are the same, and what a mask leaves out is multiplied by
0, or by 2^-127 where a kernel's exp gives no less: there is no rounding to allow for. An encoder
that convolves, mixes or averages over all positions differs, in transformers as in its graph.
"""

from __future__ import annotations

import numpy as np

from optimizer.errors import CheckpointError
from optimizer.export.reference import Arrays
from optimizer.harness.runtimes.ort.run import OrtRunner

IDS, MASK = "input_ids", "attention_mask"
NOTHING = 2.0**-64  # of the largest value: far below rounding, and far above 2^-127 of another's


def check_padding(runner: OrtRunner, batch: Arrays, values: int) -> None:
    """Raise CheckpointError when an output of an encoder's graph differs with what padding holds.

    batch: as check.random_inputs draws it. values: how many tokens there are. Inputs without a
    mask, or that have no padding, tell nothing.
    """
    if MASK not in batch or batch[MASK].all():
        return
    real = batch[MASK].astype(bool)
    drawn = np.random.default_rng(0).integers(0, values, real.shape)
    others = {**batch, IDS: np.where(real, batch[IDS], drawn).astype(batch[IDS].dtype)}
    before, after = runner.infer(batch), runner.infer(others)
    for name, value in before.items():
        of_tokens = value.ndim > 2 and value.shape[:2] == real.shape
        one, other = (v[real] if of_tokens else v for v in (value, after[name]))
        one, other = one.astype(np.float64), other.astype(np.float64)
        if not np.allclose(
            one, other, rtol=0, atol=NOTHING * np.nanmax(np.abs(one), initial=0), equal_nan=True
        ):
            moved = np.linalg.norm(other - one) / np.linalg.norm(one)
            raise CheckpointError(
                f"{name} of the same tokens moves by {moved:.2g} of itself when padding holds "
                "other tokens, so a text is answered otherwise beside a longer one than alone",
                where="model.source",
                accepted="encoders whose attention mask leaves padding out of everything",
                fix="Take a model of another architecture: this one does so in transformers too.",
            )
