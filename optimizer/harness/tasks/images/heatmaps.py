"""Places of keypoints in heatmaps, as transformers' VitPoseImageProcessor finds them for one box.

DARK (Zhang et al. 2020, arXiv:1910.06278): the largest value of a smoothed heatmap, moved to the
maximum of the parabola through the logarithms around it (one step of Newton's method).

A heatmap without a value above 0 has no keypoint; transformers then computes with place -1, and so
does this module.
"""

from __future__ import annotations

import numpy as np

from ...inputs.batch import Array
from ...inputs.boxes.warp import Box, region

RADIUS = 5  # transformers' default kernel of 11
SIGMA = 0.8
LEAST, MOST = 0.001, 50  # limits of a value before its logarithm


def keypoints(heatmaps: Array, box: Box, height: int, width: int) -> tuple[Array, Array]:
    """Find the keypoints of one box in the heatmaps of keypoint detection.

    Returns (places (keypoints, 2), x and y in pixels of the image; scores (keypoints,)), float32.

    heatmaps: (keypoints, rows, columns)
    box: left, top, width and height in pixels of the image
    height, width: size of the model's input in pixels
    """
    count, rows, columns = heatmaps.shape
    flat = heatmaps.reshape(count, -1)
    best, scores = flat.argmax(1), flat.max(1)
    places = np.stack([best % columns, best // columns], 1).astype(np.float32)
    places = np.where(scores[:, None] > 0.0, places, np.float32(-1))
    places -= _newton(_log(heatmaps), places)
    centre, size = region(box, height, width)
    step = size / np.array((columns - 1.0, rows - 1.0), np.float32)
    return places * step + centre - size * 0.5, scores


def _log(heatmaps: Array) -> Array:
    """Return logarithms of the smoothed heatmaps with their border repeated, float32."""
    for axis in (1, 2):
        heatmaps = _smooth(heatmaps, axis)
    return np.pad(np.log(np.clip(heatmaps, LEAST, MOST)), ((0, 0), (1, 1), (1, 1)), mode="edge")


def _smooth(values: Array, axis: int) -> Array:
    """Return heatmaps smoothed by a Gaussian along an axis, mirrored at the ends, as
    scipy.ndimage.gaussian_filter1d: sums are float64, the result float32."""
    at = np.arange(-RADIUS, RADIUS + 1)
    weights = np.exp(-0.5 / (SIGMA * SIGMA) * at**2)
    weights = weights / weights.sum()
    length = values.shape[axis]
    around = [(RADIUS, RADIUS) if i == axis else (0, 0) for i in range(values.ndim)]
    padded = np.pad(values.astype(np.float64), around, mode="symmetric")

    def shifted(by: int) -> Array:
        return np.take(padded, range(RADIUS + by, RADIUS + by + length), axis)

    total: Array = shifted(0) * weights[RADIUS]
    for by in range(-RADIUS, 0):
        total += (shifted(by) + shifted(-by)) * weights[RADIUS + by]
    return total.astype(np.float32)


def _newton(logs: Array, places: Array) -> Array:
    """Return the step (keypoints, 2) from each place to the heatmap's maximum. logs: with a border
    of 1."""
    count, rows, columns = logs.shape
    first = np.arange(count) * (rows * columns)
    index = (first + places[:, 0] + 1 + (places[:, 1] + 1) * columns).astype(np.int64)
    flat = logs.ravel()

    def near(x: int, y: int) -> Array:
        """Values beside the places; of place -1 in the first heatmap those of the last, as
        transformers reads them."""
        return np.asarray(flat.take(index + x + y * columns, mode="wrap"))

    here = near(0, 0)
    dx, dy = 0.5 * (near(1, 0) - near(-1, 0)), 0.5 * (near(0, 1) - near(0, -1))
    dxx = near(1, 0) - 2 * here + near(-1, 0)
    dyy = near(0, 1) - 2 * here + near(0, -1)
    dxy = near(1, 1) - near(1, 0) - near(0, 1) + here + here - near(-1, 0) - near(0, -1)
    dxy = 0.5 * (dxy + near(-1, -1))
    hessian = np.stack([dxx, dxy, dxy, dyy], 1).reshape(count, 2, 2)
    inverse = np.linalg.inv(hessian + np.finfo(np.float32).eps * np.eye(2))
    step: Array = np.einsum("jmn,jn->jm", inverse, np.stack([dx, dy], 1))
    return step
