"""How the filters of a convolution are laid over an image, and what that makes of a weight that is
kept as a matrix (out, in of a group * height * width)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

Pair = tuple[int, int]
Sides = tuple[int, int, int, int]
"""Columns on the left and the right, rows above and below."""
EVEN: Sides = (0, 0, 0, 0)
SAME: Literal["same"] = "same"
"""As TensorFlow's padding of that name, which depends on the size of the image."""


def own_sides(module: nn.Conv2d) -> tuple[Pair, Sides]:
    """(padding, sides) in numbers of what a convolution pads by itself, which may be a word: where
    "same" is an odd number, PyTorch pads one more on the right and below."""
    if not isinstance(module.padding, str):
        return cast(Pair, module.padding), EVEN
    if module.padding == "valid":
        return (0, 0), EVEN
    rows, columns = (d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True))
    return (rows // 2, columns // 2), (0, columns % 2, 0, rows % 2)


class PaddedConvolution(nn.Conv2d):
    """A convolution whose image first gets zeros on its `sides`, which need not be alike: as
    TensorFlow pads for a stride of 2."""

    def __init__(self, like: nn.Conv2d, sides: Sides | Literal["same"]) -> None:
        """like: whose parameters it shares, and whose own padding is added to the sides."""
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
        self.weight, self.bias, self.sides = like.weight, like.bias, sides
        self.train(like.training)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.pad(x, Filters.of(self).sides_of(x)))


@dataclass(frozen=True)
class Filters:
    """kernel (height, width); padding: rows and columns of 0 on both sides; sides: more of them."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int
    sides: Sides | Literal["same"] = EVEN

    @classmethod
    def of(cls, module: nn.Conv2d) -> Filters:
        """Raises ValueError for padding that is not zeros of one width on both sides."""
        if module.padding_mode != "zeros" or isinstance(module.padding, str):
            raise ValueError(f"padding {module.padding!r} {module.padding_mode}")
        kernel, stride = cast(Pair, module.kernel_size), cast(Pair, module.stride)
        padding, dilation = cast(Pair, module.padding), cast(Pair, module.dilation)
        sides = module.sides if isinstance(module, PaddedConvolution) else EVEN
        return cls(kernel, stride, padding, dilation, module.groups, sides)

    def sides_of(self, x: Tensor) -> Sides:
        """The sides for images (images, in, rows, columns). SAME is that of transformers'
        apply_tf_padding (models/mobilenet_v2)."""
        if self.sides != SAME:
            return self.sides
        (above, below), (left, right) = (
            _same(int(n), k, s, d)
            for n, k, s, d in zip(x.shape[2:], self.kernel, self.stride, self.dilation, strict=True)
        )
        return left, right, above, below

    def convolved(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (images, in, rows, columns); weight (out, in of a group * height * width)."""
        shaped = weight.reshape(len(weight), -1, *self.kernel)
        sides = self.sides_of(x)
        x = nn.functional.pad(x, sides) if sides != EVEN else x
        return nn.functional.conv2d(
            x, shaped, bias, self.stride, self.padding, self.dilation, self.groups
        )

    def mean_patches(self, x: Tensor) -> Tensor:
        """(images, in * height * width): the mean, over all places, of what the filters meet there.

        x (images, in, rows, columns).
        """
        (up, left), (down, right) = self.padding, self.padding
        before, after, above, below = self.sides_of(x)
        x = nn.functional.pad(x, (before + left, after + right, above + up, below + down))
        reach = [d * (k - 1) + 1 for d, k in zip(self.dilation, self.kernel, strict=True)]
        rows, columns = (
            (n - r) // s * s + 1 for n, r, s in zip(x.shape[2:], reach, self.stride, strict=True)
        )
        met = [
            x[:, :, i : i + rows : self.stride[0], j : j + columns : self.stride[1]].mean((2, 3))
            for i in range(0, reach[0], self.dilation[0])
            for j in range(0, reach[1], self.dilation[1])
        ]
        return torch.stack(met, 2).flatten(1)

    def at_patch(self, weight: Tensor, patch: Tensor) -> Tensor:
        """(out,): what a weight (out, in of a group * height * width) gives for one patch (in *
        height * width,)."""
        by_group = weight.reshape(self.groups, -1, weight.shape[1])
        return (by_group @ patch.reshape(self.groups, -1, 1)).flatten()


def _same(size: int, kernel: int, stride: int, dilation: int) -> Pair:
    """(before, behind) along one axis."""
    total = max(kernel - (size % stride or stride), 0)
    before = total // 2
    return before * dilation, (total - before) * dilation


def by_place(images: Tensor) -> Tensor:
    """(images, channels, rows, columns) as (places, channels)."""
    return images.movedim(1, -1).reshape(-1, images.shape[1])
