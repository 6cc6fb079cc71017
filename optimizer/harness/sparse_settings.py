"""Settings of a sparse embedding: the section `sparse` of a contract, with sentence-transformers'
names of SpladePooling and SparseEncoder.

    weight of a vocabulary entry = pooling over the tokens of f(logit)
    f(x)     log(1 + max(x, 0))               relu
             log(1 + log(1 + max(x, 0)))      log1p_relu
"""

from __future__ import annotations

from dataclasses import dataclass

from .errors import require

POOLINGS = ("max", "sum")
ACTIVATIONS = ("relu", "log1p_relu")


@dataclass(frozen=True)
class SparseSettings:
    """Section `sparse` of a bundle's contract: settings of a sparse embedding.

    pooling: name of POOLINGS
    activation: name of ACTIVATIONS
    max_active_dims: number of weights of an answer, the largest; null: all above 0
    """

    pooling: str = "max"
    activation: str = "relu"
    max_active_dims: int | None = None

    def __post_init__(self) -> None:
        require(self.pooling in POOLINGS, "sparse.pooling", self.pooling, ", ".join(POOLINGS))
        known = self.activation in ACTIVATIONS
        require(known, "sparse.activation", self.activation, ", ".join(ACTIVATIONS))
        dims = self.max_active_dims
        require(dims is None or dims > 0, "sparse.max_active_dims", dims, "1 or more, or null")
