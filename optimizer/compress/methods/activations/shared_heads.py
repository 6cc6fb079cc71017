"""Grouped-query attention: map factors of value channels to inputs of the output projection."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SharedHeads:
    """Attention whose value heads serve several query heads each, as AWQ's and SmoothQuant's
    factors need it.

    repeats: consecutive query heads per value head
    size: features per head
    """

    repeats: int
    size: int

    def of_producer(self, s: Tensor) -> Tensor:
        """Map smoothing factors s (query heads * size,) to (value heads * size,): the mean over the
        query heads of a value head."""
        return s.reshape(-1, self.repeats, self.size).mean(1).reshape(-1)

    def of_consumer(self, s: Tensor) -> Tensor:
        """Map smoothing factors s (value heads * size,) to (query heads * size,), repeating each
        value head."""
        heads = s.reshape(-1, 1, self.size).expand(-1, self.repeats, -1)
        return heads.reshape(-1)
