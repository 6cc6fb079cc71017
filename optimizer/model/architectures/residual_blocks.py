"""Records of blocks of convolutions, for rows of families.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class ConvolutionAndNorm:
    """Names, in an architecture's block, of a convolution and of the norm that alone reads its
    output, in one module."""

    convolution: str = "convolution"
    norm: str = "normalization"
    padding: str = ""  # nn.ZeroPad2d before the convolution; without effect if that pads "same"


@dataclass(frozen=True)
class BatchNorms:
    """Facts of an architecture: BatchNorms that are folded into the convolutions before them.
    Padding modules before the convolutions are folded too (checkpoint/batch_norms.py)."""

    pairs: tuple[ConvolutionAndNorm, ...] = (ConvolutionAndNorm(),)
    epsilon: float = 1e-5  # unless the config has the field `epsilon_of`
    epsilon_of: str = ""
    same: str = ""  # the config's flag for TensorFlow's padding, which depends on the image's size

    def with_config(self, config: Mapping[str, Any]) -> BatchNorms:
        """Return a copy with the epsilon that `config`, the content of config.json, states."""
        return replace(self, epsilon=float(config.get(self.epsilon_of, self.epsilon)))


@dataclass(frozen=True)
class Chain:
    """Fact of an architecture: class of modules that apply their parts one after another to their
    last argument. In a skeleton such modules are rebuilt with identities at the operands and the
    result of the residual add (model/checkpoint/chains.py)."""

    kind: str  # name of the class
    parts: tuple[str, ...]  # attributes; missing ones are skipped
    adds: str = ""  # attribute or "part.attribute" that is true where the input is added


@dataclass(frozen=True)
class Summand:
    """Fact of an architecture: tensor that is quantized at the identity `module`, an operand of a
    residual add, so that a runtime can add integers.

    With `pooled` or `whole` it is the output of a convolution that pooling or a float module reads.
    Without a quantizer there the convolution would write floats.
    """

    module: str
    convolution: str  # of the block, whose output this is
    input: bool = False  # the convolution's input in place of its output
    pooled: bool = False  # output of the convolution's activation, which pooling reads
    whole: bool = False  # output of the convolution, which a float activation reads
    last: bool = False  # `whole`, but only of the last block, where a float module reads it
