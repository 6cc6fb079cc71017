"""Facts about blocks of convolutions, as families.py states them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchNorms:
    """Wherever a module has both of these, the norm reads the convolution alone and is folded into
    it (load/batch_norms.py). epsilon: the norm's, which no file of the checkpoint holds. padding:
    an nn.ZeroPad2d beside them that the convolution alone reads, and that it does itself then; ""
    where there is none."""

    convolution: str = "convolution"
    norm: str = "normalization"
    epsilon: float = 1e-5
    padding: str = ""


@dataclass(frozen=True)
class Summand:
    """What a residual add of a block reads through `module`, which is an identity: what the block's
    `convolution` gives, or (input) what that reads. pooled: what the convolution's activation
    gives, which pooling reads and no add: without integers there, the convolution gives floats."""

    module: str
    convolution: str
    input: bool = False
    pooled: bool = False
