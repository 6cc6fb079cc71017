"""Cut a box out of an image as transformers' VitPose image processor does, to the bit.

The box grows to the proportions that the model reads, and then by PADDING. Its outer pixels become
those of the model's input ("unbiased data processing", Huang et al. 2020, arXiv:1911.07524), by
bilinear interpolation; what lies outside the image is 0.
"""

from __future__ import annotations

import numpy as np

from ..batch import Array

Box = tuple[float, float, float, float]
"""Left, top, width and height in pixels of the image."""
PADDING = 1.25
UNIT = 200.0  # pixels of a person's scale, as in COCO's top-down models


def region(box: Box, height: int, width: int) -> tuple[Array, Array]:
    """Return (centre, size) of the part of the image that is the model's input for a box, float32
    (x, y) each.

    box: left, top, width and height in pixels
    height, width: size of the model's input in pixels
    """
    left, top, across, down = box
    ratio = width / height
    centre = np.array([left + across * 0.5, top + down * 0.5], np.float32)
    if across > ratio * down:
        down = across / ratio
    elif across < ratio * down:
        across = down * ratio
    scale = np.array([across / UNIT, down / UNIT], np.float32) * PADDING
    return centre, scale * UNIT


def cut(pixels: Array, box: Box, height: int, width: int) -> Array:
    """Cut a box out of an image, as the model's input; returns uint8 (height, width, channels).

    pixels: image, uint8 (rows, columns, channels)
    height, width: size of the model's input in pixels
    """
    centre, size = region(box, height, width)
    factor = (np.array((width, height)) - 1.0) / size
    matrix = np.eye(3, dtype=np.float32)
    matrix[0, 0], matrix[1, 1] = factor
    matrix[:2, 2] = factor * (-0.5 * (centre * 2.0) + 0.5 * size)
    inverse = np.linalg.inv(matrix.astype(np.float64))
    at = [
        np.arange(count) * inverse[axis, axis] + inverse[axis, 2]
        for axis, count in ((1, height), (0, width))
    ]
    return _interpolate(pixels, *at)


def _interpolate(pixels: Array, rows: Array, columns: Array) -> Array:
    """Resample an input image at the grid `rows` x `columns`, bilinear and rounded; 0 outside the
    image."""
    inside, low, high, weights = zip(
        *(_neighbours(at, side) for at, side in zip((rows, columns), pixels.shape, strict=False)),
        strict=True,
    )
    values = pixels.astype(np.float64)
    total: Array = np.zeros((len(rows), len(columns), pixels.shape[2]))
    for row, down in zip((low[0], high[0]), weights[0], strict=True):
        for column, across in zip((low[1], high[1]), weights[1], strict=True):
            total += values[row[:, None], column] * down[:, None, None] * across[:, None]
    whole = np.floor(total + 0.5).astype(np.uint8)
    return np.where((inside[0][:, None] & inside[1])[..., None], whole, np.uint8(0))


def _neighbours(at: Array, side: int) -> tuple[Array, Array, Array, tuple[Array, Array]]:
    """Find the two pixels around each position along one side of the input image.

    Returns (mask of the positions inside, index of the pixel before, index of the pixel after,
    (weights of both)).

    at: positions in pixels
    side: length of the side in pixels
    """
    low = np.floor(at)
    before = 1.0 - (at - low)
    first = np.clip(low, 0, side - 1).astype(np.int64)
    last = np.minimum(first + 1, side - 1)
    return (at >= 0) & (at <= side - 1), first, last, (before, 1.0 - before)
