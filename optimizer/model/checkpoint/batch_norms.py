"""Fold each BatchNorm after a convolution into its weights when a checkpoint is opened.

    factor = gamma / sqrt(var + epsilon)      W' = W factor, per output channel
                                              b' = beta + (b - mean) factor

computed in float64 and rounded once: the function is the same up to roundoff. The files that `load`
wrote stay unfolded; in a skeleton the convolutions get a bias and the norms become identities.
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
from optimizer.model.architectures.residual_blocks import BatchNorms, ConvolutionAndNorm

PARTS = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
FROZEN = "FrozenBatchNorm2d"
"""End of the names of transformers' classes of norms whose parameters are buffers (DETR)."""


def fold(
    weight: Tensor, bias: Tensor | None, norm: Mapping[str, Tensor], epsilon: float
) -> tuple[Tensor, Tensor]:
    """Fold a batch norm into the convolution before it, when a checkpoint is opened: return weight
    and bias (W', b'), float32.

    weight: (out, in of a group, height, width)
    norm: tensors by their names in PARTS
    """
    gamma, beta, mean, var = (norm[part].double() for part in PARTS[:4])
    factor = gamma / torch.sqrt(var + epsilon)
    before = torch.zeros_like(mean) if bias is None else bias.double()
    shape = (-1, *(1 for _ in weight.shape[1:]))
    return (weight.double() * factor.reshape(shape)).float(), (
        beta + (before - mean) * factor
    ).float()


def fold_skeleton(model: nn.Module, norms: BatchNorms, same: bool = False) -> None:
    """Fold the norms of `model`, a skeleton, in place: each convolution gets a bias and does the
    padding; the norm and the padding module before the convolution become identities.

    norms: pairs of convolutions and norms, and the norms' epsilon
    same: True for TensorFlow's SAME padding

    Raises CheckpointError where a norm's epsilon is not `norms.epsilon`, and for negative padding.
    """
    for path, parent, pair, convolution, norm in list(find_pairs(model, norms)):
        epsilon = getattr(norm, "eps", norms.epsilon)  # of a frozen norm the ledger compares it
        if epsilon != norms.epsilon:
            raise CheckpointError(
                f"{path}.{pair.norm} has epsilon {epsilon}, but "
                f"model/architectures/families.py has {norms.epsilon}",
                where="config.json",
                fix="Use the version of transformers in constraints.txt, or correct the row.",
            )
        empty = torch.empty(convolution.out_channels, device="meta")
        convolution.bias = nn.Parameter(empty, requires_grad=False)
        setattr(parent, pair.norm, nn.Identity())
        sides = SAME if same else _sides(parent, pair, convolution)
        if sides != NO_EXTRA:
            setattr(parent, pair.convolution, PaddedConvolution(convolution, sides))


def find_pairs(
    model: nn.Module, norms: BatchNorms
) -> Iterator[tuple[str, nn.Module, ConvolutionAndNorm, nn.Conv2d, nn.Module]]:
    """Yield (name of a module, module, pair, convolution, norm) for every convolution and norm of
    `norms.pairs` in a checkpoint's torch model."""
    for path, parent in model.named_modules():
        for pair in norms.pairs:
            convolution: Any = getattr(parent, pair.convolution, None)
            norm: Any = getattr(parent, pair.norm, None)
            frozen = type(norm).__name__.endswith(FROZEN)
            if isinstance(convolution, nn.Conv2d) and (frozen or isinstance(norm, nn.BatchNorm2d)):
                yield path, parent, pair, convolution, norm


def _sides(parent: nn.Module, pair: ConvolutionAndNorm, convolution: nn.Conv2d) -> ExtraPadding:
    """Return the padding per side beyond the convolution's own, when a torch model's norms are
    folded. A word such as "same" becomes numbers, and a ZeroPad2d before the convolution becomes an
    identity, both in place. Raises CheckpointError for negative padding."""
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
            f"{pair.padding} crops the input of a convolution of {convolution.kernel_size}",
            where="config.json: kernel_sizes, depthwise_padding",
            accepted="padding by 0 or more on each side",
            fix="Use a model whose convolutions with a stride have larger filters.",
        )
    return padding.padding
