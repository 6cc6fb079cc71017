"""Facts about blocks of convolutions, as families.py states them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class BatchNorms:
    """Wherever a module has both of these, the norm reads the convolution alone and is folded into
    it (load/batch_norms.py). epsilon: the norm's, unless the config has a field `epsilon_of`, which
    says it. padding: an nn.ZeroPad2d beside them that the convolution alone reads, and that it does
    itself then; same: the config's name for whether what is around them pads the image as
    TensorFlow does, by its size, which the convolution does itself then; "" where there is none."""

    convolution: str = "convolution"
    norm: str = "normalization"
    epsilon: float = 1e-5
    epsilon_of: str = ""
    padding: str = ""
    same: str = ""

    def configured(self, config: Mapping[str, Any]) -> BatchNorms:
        """With the epsilon of a config.json."""
        return replace(self, epsilon=float(config.get(self.epsilon_of, self.epsilon)))


@dataclass(frozen=True)
class Chain:
    """Modules of the class `kind` that run their `parts` one after another, those that are there.
    adds: the attribute that says whether what was read is added to what they give. In a skeleton
    they hand on what is added, and what they give, through identities (load/chains.py)."""

    kind: str
    parts: tuple[str, ...]
    adds: str = ""


@dataclass(frozen=True)
class Summand:
    """What a residual add of a block reads through `module`, which is an identity: what the block's
    `convolution` gives, or (input) what that reads. pooled: what the convolution's activation
    gives, which pooling reads and no add: without integers there, the convolution gives floats."""

    module: str
    convolution: str
    input: bool = False
    pooled: bool = False
