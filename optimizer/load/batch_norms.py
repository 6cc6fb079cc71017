"""A BatchNorm behind a convolution becomes part of it: where a checkpoint is opened, so that every
later stage meets the folded weights, and quantizes those.

    factor = gamma / sqrt(var + epsilon)      W' = W factor, output by output
                                              b' = beta + (b - mean) factor

computed in float64 and rounded once: the function is the same up to roundoff. The checkpoint that
`load` wrote stays transformers' own; its convolutions get a bias in a skeleton, and what was the
norm hands on what it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from optimizer.errors import CheckpointError
from optimizer.filters import EVEN, SAME, PaddedConvolution
from optimizer.load.residual_blocks import BatchNorms

PARTS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def folded(
    weight: Tensor, bias: Tensor | None, norm: Mapping[str, Tensor], epsilon: float
) -> tuple[Tensor, Tensor]:
    """(W', b'), float32. weight (out, in of a group, height, width); norm: its PARTS by name."""
    gamma, beta, mean, var = (norm[part].double() for part in PARTS[:4])
    factor = gamma / torch.sqrt(var + epsilon)
    before = torch.zeros_like(mean) if bias is None else bias.double()
    shape = (-1, *(1 for _ in weight.shape[1:]))
    return (weight.double() * factor.reshape(shape)).float(), (
        beta + (before - mean) * factor
    ).float()


def fold_skeleton(model: nn.Module, norms: BatchNorms, same: bool = False) -> None:
    """Every pair in `model`, a skeleton: the convolution gets a bias, and pads by itself; the norm
    and the padding in front become identities. same: as TensorFlow pads, whatever the size.

    Raises CheckpointError for a norm that computes with another epsilon than families.py says.
    """
    for path, parent in list(model.named_modules()):
        convolution = getattr(parent, norms.convolution, None)
        norm: Any = getattr(parent, norms.norm, None)
        if not isinstance(convolution, nn.Conv2d) or not isinstance(norm, nn.BatchNorm2d):
            continue
        if norm.eps != norms.epsilon:
            raise CheckpointError(
                f"{path}.{norms.norm} has epsilon {norm.eps}, load/families.py says "
                f"{norms.epsilon}",
                where="config.json",
                fix="Use the version of transformers in constraints.txt, or correct the row.",
            )
        empty = torch.empty(convolution.out_channels, device="meta")
        convolution.bias = nn.Parameter(empty, requires_grad=False)
        setattr(parent, norms.norm, nn.Identity())
        if same:
            setattr(parent, norms.convolution, PaddedConvolution(convolution, SAME))
        padding = getattr(parent, norms.padding, None) if norms.padding else None
        if isinstance(padding, nn.ZeroPad2d):
            setattr(parent, norms.padding, nn.Identity())
            if padding.padding != EVEN:
                padded = PaddedConvolution(convolution, padding.padding)
                setattr(parent, norms.convolution, padded)
