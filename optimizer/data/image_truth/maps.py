"""Read label masks and depth maps: one number for each pixel of an image."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from optimizer.data.pictures import Picture
from optimizer.foundation.errors import DataError
from optimizer.harness.inputs.image_file import import_pillow

NUMPY = b"\x93NUMPY"
MODES = ("1", "L", "P", "I", "I;16", "I;16L", "I;16B", "F")
"""Pillow's modes of one number per pixel; of a palette its number is read."""


def read_map(picture: Picture, sides: tuple[int, ...], where: str) -> npt.NDArray[Any]:
    """Read a data set's label mask or depth map: the numbers (height, width) in an image of one
    channel, or a .npy.

    sides: height and width of the image that the map belongs to
    where: the row, for messages

    Raises DataError for another file, and for other sides than the image's.
    """
    source = picture.source
    content = source.read_bytes() if isinstance(source, Path) else source
    try:
        if content.startswith(NUMPY):
            array = np.load(io.BytesIO(content), allow_pickle=False)
        else:
            with import_pillow().open(io.BytesIO(content)) as opened:
                if opened.mode not in MODES:
                    raise ValueError(f"its pixels are {opened.mode}")
                array = np.asarray(opened)
    except (OSError, ValueError, EOFError) as e:
        raise DataError(
            f"{picture.name} cannot be read ({str(e)[:120]})",
            where=where,
            accepted="an image with one number per pixel (grey, 16 bits, palette), or a .npy file",
        ) from None
    if array.shape != tuple(sides):
        raise DataError(
            f"{picture.name} has the shape {array.shape}, and its image {tuple(sides)}",
            where=where,
            accepted="a number for each pixel of the image, turned as its EXIF says",
        )
    numbers: npt.NDArray[Any] = array.astype(np.int64) if array.dtype == bool else array
    return numbers
