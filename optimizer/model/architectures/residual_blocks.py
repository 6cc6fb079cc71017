"""Facts about blocks of convolutions, as families.py states them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Pair:
    """A convolution and the norm that alone reads it, by their names in one module. padding: an
    nn.ZeroPad2d beside them, "" where there is none, that the convolution alone reads, and nothing
    where its own padding is "same"."""

    convolution: str = "convolution"
    norm: str = "normalization"
    padding: str = ""


@dataclass(frozen=True)
class BatchNorms:
    """Wherever a module has both of one of `pairs`, the norm is folded into the convolution
    (model/checkpoint/batch_norms.py), which does the padding itself then. epsilon: the norms',
    unless the config has a field `epsilon_of`, which says it. same: the config's name for whether
    what is around them pads the image as TensorFlow does, by its size, which the convolution does
    itself then; "" where there is none."""

    pairs: tuple[Pair, ...] = (Pair(),)
    epsilon: float = 1e-5
    epsilon_of: str = ""
    same: str = ""

    def configured(self, config: Mapping[str, Any]) -> BatchNorms:
        """With the epsilon of a config.json."""
        return replace(self, epsilon=float(config.get(self.epsilon_of, self.epsilon)))


@dataclass(frozen=True)
class Chain:
    """Modules of the class `kind` that run their `parts` one after another, those that are there,
    of what they are given last. adds: the attribute, perhaps of a part ("part.attribute"), that
    says whether what was read is added to what they give. In a skeleton they hand on what is added,
    and what they give, through identities (model/checkpoint/chains.py)."""

    kind: str
    parts: tuple[str, ...]
    adds: str = ""


@dataclass(frozen=True)
class Summand:
    """What a residual add of a block reads through `module`, which is an identity: what the block's
    `convolution` gives, or (input) what that reads.

    Two kinds are read by no add: without integers behind it a convolution gives floats. pooled:
    what the convolution's activation gives, which pooling reads. whole: what the convolution gives,
    whatever reads it: a float activation, in one operator or several, or (last: of the last block
    alone) a module that is float."""

    module: str
    convolution: str
    input: bool = False
    pooled: bool = False
    whole: bool = False
    last: bool = False
