"""Facts about blocks of convolutions, as families.py states them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchNorms:
    """Wherever a module has both of these, the norm reads the convolution alone and is folded into
    it (load/batch_norms.py). epsilon: the norm's, which no file of the checkpoint holds."""

    convolution: str = "convolution"
    norm: str = "normalization"
    epsilon: float = 1e-5


@dataclass(frozen=True)
class Summand:
    """What a residual add of a block reads through `module`, which is an identity: what the block's
    `convolution` gives, or (input) what that reads."""

    module: str
    convolution: str
    input: bool = False
