"""Pooling over all places of an image, said so.

transformers' EfficientNet pools with a window of as many rows and columns as there are features,
which is cut off at the image's edges and so covers all of it: where it does not, the model makes
several vectors per image and refuses them. No runtime has to have windows as large.
"""

from __future__ import annotations

from torch import nn

_OVER_ALL: tuple[tuple[type[nn.Module], type[nn.Module]], ...] = (
    (nn.AvgPool2d, nn.AdaptiveAvgPool2d),
    (nn.MaxPool2d, nn.AdaptiveMaxPool2d),
)


def replace(model: nn.Module, name: str) -> None:
    """The pooling of that name in `model` gets no window, only a result of one place."""
    pool = model.get_submodule(name)
    for windowed, over_all in _OVER_ALL:
        if isinstance(pool, windowed):
            model.set_submodule(name, over_all(1))
