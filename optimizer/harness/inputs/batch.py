"""The arrays that a model takes at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class Batch(dict[str, Array]):
    """The model's input arrays by name, batch first; what `Runner.infer` takes.

    inputs: what was encoded, in order. encodings: what the kind of input made of each; of a text
    the tokenizer's view of it (offsets, word numbers). real: which positions are not padding, as
    the kind's `real` says it; all of (batch) by default.
    """

    def __init__(
        self,
        arrays: dict[str, Array],
        inputs: Sequence[Any],
        encodings: Sequence[Any],
        real: Array | None = None,
    ) -> None:
        super().__init__(arrays)
        self.inputs = tuple(inputs)
        self.encodings = tuple(encodings)
        self.real = np.ones(self.rows, bool) if real is None else real

    @property
    def rows(self) -> int:
        """How many inputs it holds."""
        return len(next(iter(self.values())))
