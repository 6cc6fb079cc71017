"""Batch of input arrays for one run of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Batch(dict[str, Array]):
    """The model's input arrays by name, batch axis first; the argument of `Runner.infer`.

    inputs: the inputs that were encoded, in order.
    encodings: encoding of each input, e.g. the tokenizer's, with offsets and word numbers.
    real: mask of the positions that are not padding, from the kind's `real`; all rows by default.
    encoder: encoder of the inputs, e.g. the tokenizer; None where the answers do not need it.
    skipped: number of first positions that are left out of the pooling, per input; () for none.
    sides: height and width of each image before it was resized; () for other inputs.
    """

    def __init__(
        self,
        arrays: dict[str, Array],
        inputs: Sequence[Any],
        encodings: Sequence[Any],
        real: Array | None = None,
        encoder: Any = None,
        skipped: Sequence[int] = (),
        sides: Sequence[tuple[int, ...]] = (),
    ) -> None:
        super().__init__(arrays)
        self.inputs = tuple(inputs)
        self.encodings = tuple(encodings)
        self.encoder = encoder
        self.real = np.ones(self.rows, bool) if real is None else real
        self.skipped = tuple(skipped) if any(skipped) else ()
        self.sides = tuple(sides)

    @property
    def rows(self) -> int:
        """Number of inputs in the batch."""
        return len(next(iter(self.values())))

    @property
    def pooled(self) -> Array:
        """Mask of the input positions that are pooled, (batch, sequence)."""
        if not self.skipped:
            return self.real
        places = np.arange(self.real.shape[1])[None]
        return np.asarray(self.real & (places >= np.array(self.skipped)[:, None]))
