"""How the filters of a convolution are laid over an image, and what that makes of a weight that is
kept as a matrix (out, in of a group * height * width)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

Pair = tuple[int, int]


@dataclass(frozen=True)
class Filters:
    """kernel (height, width); padding: rows and columns of 0 on each side."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int

    @classmethod
    def of(cls, module: nn.Conv2d) -> Filters:
        """Raises ValueError for padding that is not zeros of one width on both sides."""
        if module.padding_mode != "zeros" or isinstance(module.padding, str):
            raise ValueError(f"padding {module.padding!r} {module.padding_mode}")
        kernel, stride = cast(Pair, module.kernel_size), cast(Pair, module.stride)
        padding, dilation = cast(Pair, module.padding), cast(Pair, module.dilation)
        return cls(kernel, stride, padding, dilation, module.groups)

    def convolved(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x (images, in, rows, columns); weight (out, in of a group * height * width)."""
        shaped = weight.reshape(len(weight), -1, *self.kernel)
        return nn.functional.conv2d(
            x, shaped, bias, self.stride, self.padding, self.dilation, self.groups
        )


def by_place(images: Tensor) -> Tensor:
    """(images, channels, rows, columns) as (places, channels)."""
    return images.movedim(1, -1).reshape(-1, images.shape[1])
