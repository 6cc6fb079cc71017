"""Images as the section `image` of an ONNX file's contract prepares them, by Pillow and torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from optimizer.harness.image_settings import LINEAR, ImageSettings
from optimizer.harness.inputs.batch import Array

ROUNDOFF = 8 * 255 * 2.0**-24
"""Bound on the error of a pixel interpolated in float32 along both axes. One axis computes
v0 (1 - s) + v1 s with v0 and v1 up to 255; the roundings of s, 1 - s, both products (whose factors
add to 1) and the sum contribute at most 255 * 2^-24 each."""


def prepare(settings: ImageSettings, image: Any) -> tuple[Array, ...]:
    """Return the arrays of expected pixels of an image, float32 (1, channels, height, width), for
    the ledger. A pixel may be that of either of them. The filter LINEAR has two, which differ where
    a pixel lies so close to a half that float32 rounds it up or down; others have one.

    image: Pillow image, in the mode of the settings' channels
    """
    from PIL import Image

    height, width = settings.height, settings.width
    top = left = 0
    if settings.letterbox is not None:
        scale = min(height / image.height, width / image.width)
        height, width = (max(1, round(side * scale)) for side in (image.height, image.width))
        if settings.letterbox.place == "centre":
            top, left = (settings.height - height) // 2, (settings.width - width) // 2
    if settings.resample == LINEAR:
        pixels = torch.from_numpy(np.array(image)).reshape(image.height, image.width, -1)
        planes = pixels.permute(2, 0, 1)[None].double()
        planes = functional.interpolate(planes, (height, width), mode="bilinear")
        whole = [(planes - ROUNDOFF).round(), (planes + ROUNDOFF).round()]
    else:
        resized = image.resize((width, height), Image.Resampling[settings.resample.upper()])
        pixels = torch.from_numpy(np.array(resized)).reshape(height, width, -1)
        whole = [pixels.permute(2, 0, 1)[None].double()]
    frame = left, settings.width - width - left, top, settings.height - height - top
    return tuple(
        _normalize(settings, functional.pad(w, frame, value=_fill(settings))) for w in whole
    )


def _fill(settings: ImageSettings) -> float:
    return float(settings.letterbox.fill) if settings.letterbox else 0.0


def _normalize(settings: ImageSettings, planes: torch.Tensor) -> Array:
    """Compute the values that the model reads from whole pixels (1, channels, height, width)."""
    planes = planes.flip(1) if settings.bgr else planes
    values = planes if settings.rescale is None else planes * settings.rescale
    values = values.float()
    if settings.mean is not None and settings.std is not None:
        mean, std = (torch.tensor(v).reshape(-1, 1, 1) for v in (settings.mean, settings.std))
        values = (values - mean) / std
    return values.numpy()


def agree(actual: Array, expected: Sequence[Array]) -> bool:
    """Return True where every pixel is that of one of the expected arrays, bit by bit."""
    if any(actual.shape != one.shape for one in expected):
        return False
    return bool(np.logical_or.reduce([actual == one for one in expected]).all())
