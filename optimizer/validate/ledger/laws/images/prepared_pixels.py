"""Images as the section `image` of an ONNX file's contract prepares them, by Pillow and torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn import functional

from optimizer.harness.image_settings import LINEAR, ImageSettings
from optimizer.harness.inputs.batch import Array


def prepare(settings: ImageSettings, image: Any) -> Array:
    """Return the expected pixels of an image, float32 (1, channels, height, width), for the ledger.

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
        planes = functional.interpolate(planes, (height, width), mode="bilinear").round()
    else:
        resized = image.resize((width, height), Image.Resampling[settings.resample.upper()])
        pixels = torch.from_numpy(np.array(resized)).reshape(height, width, -1)
        planes = pixels.permute(2, 0, 1)[None].double()
    fill = float(settings.letterbox.fill) if settings.letterbox else 0.0
    right, below = settings.width - width - left, settings.height - height - top
    planes = functional.pad(planes, (left, right, top, below), value=fill)
    planes = planes.flip(1) if settings.bgr else planes
    values = planes if settings.rescale is None else planes * settings.rescale
    values = values.float()
    if settings.mean is not None and settings.std is not None:
        mean, std = (torch.tensor(v).reshape(-1, 1, 1) for v in (settings.mean, settings.std))
        values = (values - mean) / std
    return values.numpy()


def are_near(settings: ImageSettings, actual: Array, expected: Array) -> bool:
    """Return True for the harness's and the expected pixels where they differ by one step of a
    pixel at most, with the filter LINEAR, whose float32 sums may round to another whole number."""
    if settings.resample != LINEAR or actual.shape != expected.shape:
        return False
    std = np.ones(settings.channels) if settings.std is None else np.array(settings.std)
    step = (1.0 if settings.rescale is None else settings.rescale) / std
    steps = np.abs(actual.astype(np.float64) - expected) / np.abs(step).reshape(1, -1, 1, 1)
    return bool((np.rint(steps) <= 1).all())
