"""Geometry of a 2-D convolution (kernel, stride, padding, dilation, groups), and convolution with a
weight stored as a matrix (out, in of a group * height * width)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

Pair = tuple[int, int]
ExtraPadding = tuple[int, int, int, int]
"""Columns on the left and the right, rows above and below."""
NO_EXTRA: ExtraPadding = (0, 0, 0, 0)
SAME: Literal["same"] = "same"
"""TensorFlow's padding of that name, which depends on the size of the image."""


def split_padding(module: nn.Conv2d) -> tuple[Pair, ExtraPadding]:
    """Return a torch convolution's padding in numbers: (symmetric part, rest).

    The rest is not zero for padding "same" with an odd total, of which PyTorch puts one more on the
    right and below.
    """
    if not isinstance(module.padding, str):
        return cast(Pair, module.padding), NO_EXTRA
    if module.padding == "valid":
        return (0, 0), NO_EXTRA
    rows, columns = (d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True))
    return (rows // 2, columns // 2), (0, columns % 2, 0, rows % 2)


class PaddedConvolution(nn.Conv2d):
    """Torch convolution whose image is first padded with zeros by `extra_padding`, which may differ
    between sides. TensorFlow pads in this way for a stride of 2."""

    def __init__(self, like: nn.Conv2d, extra_padding: ExtraPadding | Literal["same"]) -> None:
        """Share the parameters of `like`, a convolution whose own padding is kept.

        extra_padding: zeros per side besides that padding, or "same" for TensorFlow's SAME
        """
        super().__init__(
            like.in_channels,
            like.out_channels,
            cast(Pair, like.kernel_size),
            cast(Pair, like.stride),
            cast(Pair, like.padding),
            cast(Pair, like.dilation),
            like.groups,
            bias=False,
            device="meta",
        )
        self.weight, self.bias, self.extra_padding = like.weight, like.bias, extra_padding
        self.train(like.training)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.pad(x, ConvGeometry.read(self).extra_padding_of(x)))


@dataclass(frozen=True)
class ConvGeometry:
    """Geometry of one convolution, which several stages compute with its weight as a matrix.

    kernel, stride, dilation: (height, width)
    padding: rows and columns of zeros on both sides
    extra_padding: zeros beyond `padding`, by side
    """

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int
    extra_padding: ExtraPadding | Literal["same"] = NO_EXTRA

    @classmethod
    def read(cls, module: nn.Conv2d) -> ConvGeometry:
        """Read the geometry of a convolution. Raises ValueError for padding that is not zeros, or
        is given as a word."""
        if module.padding_mode != "zeros" or isinstance(module.padding, str):
            raise ValueError(f"padding {module.padding!r} {module.padding_mode}")
        kernel, stride = cast(Pair, module.kernel_size), cast(Pair, module.stride)
        padding, dilation = cast(Pair, module.padding), cast(Pair, module.dilation)
        extra = module.extra_padding if isinstance(module, PaddedConvolution) else NO_EXTRA
        return cls(kernel, stride, padding, dilation, module.groups, extra)

    def extra_padding_of(self, x: Tensor) -> ExtraPadding:
        """Return a convolution's extra padding for images (images, in, rows, columns), per side.
        SAME is computed as by transformers' apply_tf_padding (models/mobilenet_v2)."""
        if self.extra_padding != SAME:
            return self.extra_padding
        (above, below), (left, right) = (
            _same(int(n), k, s, d)
            for n, k, s, d in zip(x.shape[2:], self.kernel, self.stride, self.dilation, strict=True)
        )
        return left, right, above, below

    def conv2d(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Convolve x (images, in, rows, columns) with a weight stored as a matrix."""
        shaped = weight.reshape(len(weight), -1, *self.kernel)
        extra = self.extra_padding_of(x)
        x = nn.functional.pad(x, extra) if extra != NO_EXTRA else x
        return nn.functional.conv2d(
            x, shaped, bias, self.stride, self.padding, self.dilation, self.groups
        )

    def mean_patch(self, x: Tensor) -> Tensor:
        """Return the patch under a convolution's kernel, averaged over all positions: (images, in *
        height * width).

        x: (images, in, rows, columns)
        """
        (up, left), (down, right) = self.padding, self.padding
        before, after, above, below = self.extra_padding_of(x)
        x = nn.functional.pad(x, (before + left, after + right, above + up, below + down))
        reach = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel, strict=True)]
        rows, columns = (
            (n - r) // s * s + 1 for n, r, s in zip(x.shape[2:], reach, self.stride, strict=True)
        )
        means = [
            x[:, :, i : i + rows : self.stride[0], j : j + columns : self.stride[1]].mean((2, 3))
            for i in range(0, reach[0], self.dilation[0])
            for j in range(0, reach[1], self.dilation[1])
        ]
        return torch.stack(means, 2).flatten(1)

    def apply_to_patch(self, weight: Tensor, patch: Tensor) -> Tensor:
        """Return the output (out,) of the convolution at one position.

        weight: (out, in of a group * height * width)
        patch: (in * height * width,)
        """
        by_group = weight.reshape(self.groups, -1, weight.shape[1])
        return (by_group @ patch.reshape(self.groups, -1, 1)).flatten()


def _same(size: int, kernel: int, stride: int, dilation: int) -> Pair:
    """Compute SAME padding of a convolution (before, after) along one axis."""
    total = max(kernel - (size % stride or stride), 0)
    before = total // 2
    return before * dilation, (total - before) * dilation


def flatten_positions(images: Tensor) -> Tensor:
    """Reshape a convolution's images (images, channels, rows, columns) to (positions, channels)."""
    return images.movedim(1, -1).reshape(-1, images.shape[1])
