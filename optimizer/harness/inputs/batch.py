"""The arrays that a model takes at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]


class Batch(dict[str, Array]):
    """The model's input arrays by name, batch first; what `Runner.infer` takes.

    inputs: what was encoded, in order. encodings: what the kind of input made of each; of a text
    the tokenizer's view of it (offsets, word numbers).
    """

    def __init__(self, arrays: dict[str, Array], inputs: Sequence[Any], encodings: Sequence[Any]):
        super().__init__(arrays)
        self.inputs = tuple(inputs)
        self.encodings = tuple(encodings)
