"""A BatchNorm behind a convolution becomes part of it: where a checkpoint is opened, so that every
later stage meets the folded weights, and quantizes those.

    factor = gamma / sqrt(var + epsilon)      W' = W factor, output by output
                                              b' = beta + (b - mean) factor

computed in float64 and rounded once: the function is the same up to roundoff. The checkpoint that
`load` wrote stays transformers' own; its convolutions get a bias in a skeleton, and what was the
norm hands on what it reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from optimizer.foundation.conv_geometry import (
    NO_EXTRA,
    SAME,
    ExtraPadding,
    PaddedConvolution,
    split_padding,
)
from optimizer.foundation.errors import CheckpointError
from optimizer.model.architectures.residual_blocks import BatchNorms, Pair

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

    Raises CheckpointError for a norm that computes with another epsilon than
    model/architectures/families.py says, and for a padding that cuts off.
    """
    for path, parent, pair, convolution, norm in list(normed(model, norms)):
        if norm.eps != norms.epsilon:
            raise CheckpointError(
                f"{path}.{pair.norm} has epsilon {norm.eps}, "
                f"model/architectures/families.py says {norms.epsilon}",
                where="config.json",
                fix="Use the version of transformers in constraints.txt, or correct the row.",
            )
        empty = torch.empty(convolution.out_channels, device="meta")
        convolution.bias = nn.Parameter(empty, requires_grad=False)
        setattr(parent, pair.norm, nn.Identity())
        sides = SAME if same else _sides(parent, pair, convolution)
        if sides != NO_EXTRA:
            setattr(parent, pair.convolution, PaddedConvolution(convolution, sides))


def normed(
    model: nn.Module, norms: BatchNorms
) -> Iterator[tuple[str, nn.Module, Pair, nn.Conv2d, nn.BatchNorm2d]]:
    """(path, the module there, a pair of `norms` that it has, its convolution, its norm)."""
    for path, parent in model.named_modules():
        for pair in norms.pairs:
            convolution: Any = getattr(parent, pair.convolution, None)
            norm: Any = getattr(parent, pair.norm, None)
            if isinstance(convolution, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                yield path, parent, pair, convolution, norm


def _sides(parent: nn.Module, pair: Pair, convolution: nn.Conv2d) -> ExtraPadding:
    """What the convolution pads besides the numbers that its own padding becomes. Raises
    CheckpointError for a padding that cuts off."""
    unread = convolution.padding == "same"
    convolution.padding, sides = split_padding(convolution)
    padding = getattr(parent, pair.padding, None) if pair.padding else None
    if not isinstance(padding, nn.ZeroPad2d):
        return sides
    setattr(parent, pair.padding, nn.Identity())
    if unread:
        return sides
    if min(padding.padding) < 0:
        raise CheckpointError(
            f"{pair.padding} cuts off what a convolution of {convolution.kernel_size} would read",
            where="config.json: kernel_sizes, depthwise_padding",
            accepted="padding by 0 or more on each side",
            fix="Use a model whose convolutions of a stride have larger filters.",
        )
    return padding.padding
