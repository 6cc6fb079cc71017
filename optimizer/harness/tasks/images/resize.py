"""Enlarge or shrink maps of numbers as torch's interpolate does, without align_corners.

    source position of target position i:  (i + 0.5) * from / to - 0.5

Weights and sums are float32, as in torch.
"""

from __future__ import annotations

import numpy as np

from ...inputs.batch import Array

SHARPNESS = np.float32(-0.75)  # torch's coefficient of cubic convolution (Keys 1981)


def resize(maps: Array, height: int, width: int, cubic: bool = False) -> Array:
    """Resize an image task's output: return maps (..., rows, columns) as (..., height, width),
    bilinear or bicubic."""
    for axis, size in ((-2, height), (-1, width)):
        maps = _resize_axis(maps, axis, size, cubic)
    return maps


def _resize_axis(maps: Array, axis: int, size: int, cubic: bool) -> Array:
    """Resize an image task's maps along one axis to `size`, bilinear or bicubic."""
    length = maps.shape[axis]
    at = (np.arange(size, dtype=np.float32) + np.float32(0.5)) * np.float32(length / size)
    at = at - np.float32(0.5)
    if not cubic:
        at = np.maximum(at, np.float32(0))
    first = np.floor(at).astype(np.int64)
    part = at - first.astype(np.float32)
    weights = _cubic(part) if cubic else ((0, 1 - part), (1, part))
    shape = [1] * maps.ndim
    shape[axis] = size
    total: Array = np.zeros((), np.float32)
    for offset, weight in weights:
        rows = np.take(maps, np.clip(first + offset, 0, length - 1), axis)
        total = total + rows * weight.reshape(shape)
    return total


def _cubic(part: Array) -> tuple[tuple[int, Array], ...]:
    a = SHARPNESS

    def near(x: Array) -> Array:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Array) -> Array:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return (-1, far(part + 1)), (0, near(part)), (1, near(1 - part)), (2, far(2 - part))
