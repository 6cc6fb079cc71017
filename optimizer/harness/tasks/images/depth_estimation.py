"""depth-estimation: a number for each pixel of an image, in the model's own unit (for many models
the inverse of depth, without a scale)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ...inputs.batch import Array, Batch
from ...inputs.image import IMAGE
from ...inputs.image_file import read_sides
from ..task import Task, unchanged
from . import NOT_IN_BROWSER
from .base64_files import npy, png
from .resize import resize

if TYPE_CHECKING:
    from ...contract import Contract


def depth_map(depths: Array, sides: tuple[int, ...]) -> Array:
    """Resize a model's depths (rows, columns) to the size of the image.

    sides: (height, width) in pixels
    """
    height, width = sides
    return resize(depths, height, width, cubic=True)


def answers(contract: Contract, values: Array, batch: Batch) -> list[dict[str, Any]]:
    """Return the answers of depth estimation, {"least", "most", "predicted_depth", "depth"} per
    image.

    least, most: of `predicted_depth`.
    predicted_depth: base64 of a NumPy file (.npy), float32 (height, width) of the image.
    depth: PNG in base64, 8 bits: 0 where the depth is least, 255 where it is most.
    """
    del contract
    rows = []
    for depths, sides in zip(values, batch.sides, strict=True):
        wide = depth_map(depths, sides)
        least, most = float(wide.min()), float(wide.max())
        scaled = (wide - least) / (most - least) if most > least else np.zeros_like(wide)
        rows.append(
            {
                "least": least,
                "most": most,
                "predicted_depth": npy(wide),
                "depth": png((scaled * 255).astype(np.uint8)),
            }
        )
    return rows


def most_bytes(contract: Contract, image: Any) -> int:
    """Return the maximum bytes of a depth map as an answer: five bytes a pixel, in base64."""
    del contract
    height, width = read_sides(image)
    return height * width * 8 + 8192


def line(answer: Mapping[str, Any]) -> str:
    """Return an answer of depth estimation as text for a person."""
    return f"{answer['least']:.4f} to {answer['most']:.4f}  (--json prints the map)"


TASK = Task(
    name="depth-estimation",
    inputs=IMAGE,
    output="predicted_depth",
    axes=("batch", "rows", "columns"),
    metrics={"cosine": (), "abs_rel": (("depth",),), "delta1": (("depth",),)},
    decode=unchanged,
    answers=answers,
    line=line,
    bytes=most_bytes,
    gives="a depth for each pixel",
    model="transformers:AutoModelForDepthEstimation",
    heads=("ForDepthEstimation",),
    not_in_browser=NOT_IN_BROWSER,
)
