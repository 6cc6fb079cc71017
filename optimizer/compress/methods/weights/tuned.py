"""What a method that follows gradients gives back."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from optimizer.foundation.qtensor import QTensor


@dataclass(frozen=True)
class Tuned:
    """weights and norm weights by the names they were passed under; before and after: the loss."""

    weights: dict[str, QTensor]
    norm_weights: dict[str, Tensor]
    before: float
    after: float
