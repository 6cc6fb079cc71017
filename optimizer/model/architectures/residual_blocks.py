"""Records of blocks of convolutions, for rows of families.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Pair:
    """A convolution of a module and the norm that is its only reader, by name."""

    convolution: str = "convolution"
    norm: str = "normalization"
    padding: str = ""  # nn.ZeroPad2d before the convolution; without effect if that pads "same"


@dataclass(frozen=True)
class BatchNorms:
    """Norms that are folded into convolutions, which then do the padding too (batch_norms.py)."""

    pairs: tuple[Pair, ...] = (Pair(),)
    epsilon: float = 1e-5  # unless the config has the field `epsilon_of`
    epsilon_of: str = ""
    same: str = ""  # the config's flag for TensorFlow's padding, which depends on the image's size

    def with_config(self, config: Mapping[str, Any]) -> BatchNorms:
        """These norms with the epsilon of `config`, the content of config.json."""
        return replace(self, epsilon=float(config.get(self.epsilon_of, self.epsilon)))


@dataclass(frozen=True)
class Chain:
    """Modules that apply their parts in order to their last argument. In a skeleton, identities
    carry the operands of a residual add and the result (model/checkpoint/chains.py)."""

    kind: str  # name of the class
    parts: tuple[str, ...]  # attributes; missing ones are skipped
    adds: str = ""  # attribute or "part.attribute" that is true where the input is added


@dataclass(frozen=True)
class Summand:
    """Operand of a residual add, quantized at the identity `module`.

    `pooled` and `whole` are not operands of an add; they are quantized because a convolution
    without integers after it outputs floats.
    """

    module: str
    convolution: str  # of the block, whose output this is
    input: bool = False  # the convolution's input in place of its output
    pooled: bool = False  # output of the convolution's activation, which pooling reads
    whole: bool = False  # output of the convolution, which a float activation reads
    last: bool = False  # `whole`, but only of the last block, where a float module reads it
