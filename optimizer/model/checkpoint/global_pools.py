"""Replace a pooling whose window is larger than any image by global pooling.

The window of transformers' EfficientNet has `hidden_dim` rows and columns, far more than a feature
map, and is cut off at its edges; a smaller window would give several vectors per image, which the
model refuses. Runtimes need not support windows of this size.
"""

from __future__ import annotations

from torch import nn

_OVER_ALL: tuple[tuple[type[nn.Module], type[nn.Module]], ...] = (
    (nn.AvgPool2d, nn.AdaptiveAvgPool2d),
    (nn.MaxPool2d, nn.AdaptiveMaxPool2d),
)


def replace(model: nn.Module, name: str) -> None:
    """Replace the pooling module `name` in `model` by global pooling, with a result of 1 x 1."""
    pool = model.get_submodule(name)
    for windowed, over_all in _OVER_ALL:
        if isinstance(pool, windowed):
            model.set_submodule(name, over_all(1))
