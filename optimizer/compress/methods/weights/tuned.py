"""Result of a method that trains by gradients."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from optimizer.foundation.qtensor import QTensor


@dataclass(frozen=True)
class Tuned:
    """Tuned weights and norm weights, under the names of the method's arguments.

    before, after: loss before and after tuning
    """

    weights: dict[str, QTensor]
    norm_weights: dict[str, Tensor]
    before: float
    after: float
