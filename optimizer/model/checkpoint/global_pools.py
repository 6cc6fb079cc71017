"""Replace pooling with a window larger than any image by global pooling.

The pooling window of transformers' EfficientNet has `hidden_dim` rows and columns, far more than a
feature map, and is cut off at the map's edges. Runtimes need not support windows of this size. With
a smaller window there would be several vectors per image, which the model refuses.
"""

from __future__ import annotations

from torch import nn

_OVER_ALL: tuple[tuple[type[nn.Module], type[nn.Module]], ...] = (
    (nn.AvgPool2d, nn.AdaptiveAvgPool2d),
    (nn.MaxPool2d, nn.AdaptiveMaxPool2d),
)


def replace(model: nn.Module, name: str) -> None:
    """Replace the pooling module `name` in the torch model `model` by global pooling, with a result
    of 1 x 1."""
    pool = model.get_submodule(name)
    for windowed, over_all in _OVER_ALL:
        if isinstance(pool, windowed):
            model.set_submodule(name, over_all(1))
