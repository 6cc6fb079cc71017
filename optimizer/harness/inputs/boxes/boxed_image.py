"""Cut each box out of an image and encode it as an image of its own, a row of the model.

The boxes of a request are its second input: JSON [[left, top, width, height], ...] in pixels of the
image, turned as EXIF says. Without them the whole image is one box.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...image_settings import ImageSettings
from .. import image
from ..batch import Array, Batch
from ..image import IMAGE
from ..image_file import PIXELS, UnreadableImage, import_pillow, load_image
from ..kind import Encoded
from .warp import Box, cut

if TYPE_CHECKING:
    from ...contract import Contract

BOXES = 100  # maximum of an image
FIX = f"Give up to {BOXES} boxes as [[left, top, width, height], ...] in pixels of the image."


@dataclass(frozen=True)
class Boxed:
    """An image of a data set with its boxes, in place of an image.

    image: path, bytes or array.
    """

    image: Any
    boxes: tuple[Box, ...]

    @property
    def as_text(self) -> str:
        """The boxes as the second input of a request."""
        return json.dumps(self.boxes)


@dataclass(frozen=True)
class Crop:
    """Encoding of a box: its pixels, uint8 (height, width, channels), and its place."""

    pixels: Array
    box: Box


def encode(
    contract: Contract,
    _encoder: None,
    images: Sequence[Any],
    boxes: Sequence[Any] | None = None,
    size: int | None = None,
) -> list[Encoded]:
    """Cut out the boxes of each image; `more` of a result are those behind the first.

    images: as image.encode takes them, or Boxed.
    boxes: JSON text or lists per image; None for the whole image.
    An image or boxes that cannot be read get a `problem`. Raises InputError as image.encode does.
    """
    del size
    import_pillow()
    image.check_some(images)
    each = zip(images, boxes or [None] * len(images), strict=True)
    return [_encoded(contract.images, one, named) for one, named in each]


def _encoded(settings: ImageSettings, source: Any, named: Any) -> Encoded:
    """Cut the boxes out of one image, as inputs of the model; the result has a part per box, or a
    `problem`."""
    opened = source.image if isinstance(source, Boxed) else source
    named = source.boxes if isinstance(source, Boxed) else named
    try:
        picture = load_image(opened, settings.channels)
        boxes = read_boxes(named, *picture.size)
    except UnreadableImage as e:
        return Encoded(source, None, size=1, problem=e.problem, fix=e.fix)
    pixels = np.asarray(picture)
    pixels = pixels[..., None] if pixels.ndim == 2 else pixels
    sides = pixels.shape[:2]
    parts = [
        Encoded(
            source, Crop(cut(pixels, b, settings.height, settings.width), b), size=1, sides=sides
        )
        for b in boxes
    ]
    return replace(parts[0], more=tuple(parts[1:]))


def read_boxes(named: Any, width: int, height: int) -> list[Box]:
    """Read an image's boxes from `named` (JSON text, a list or None). Raises UnreadableImage for
    none, too many, and one that is not four numbers or is outside the image."""
    if named is None:
        return [(0.0, 0.0, float(width), float(height))]
    if isinstance(named, str):
        try:
            named = json.loads(named)
        except (ValueError, RecursionError):
            raise UnreadableImage("its boxes are not JSON", FIX) from None
    if not isinstance(named, list | tuple) or not 0 < len(named) <= BOXES:
        count = f"{len(named)} boxes" if isinstance(named, list | tuple) else "no list of boxes"
        raise UnreadableImage(f"it has {count}", FIX)
    boxes: list[Box] = []
    for i, box in enumerate(named):
        if not isinstance(box, list | tuple) or len(box) != 4 or not all(map(_number, box)):
            raise UnreadableImage(f"its box {i} is {str(box)[:80]}, not four numbers", FIX)
        left, top, across, down = map(float, box)
        if min(across, down) <= 0:
            raise UnreadableImage(f"its box {i} has a side of {min(across, down):g}", FIX)
        if left >= width or top >= height or left + across <= 0 or top + down <= 0:
            shown = f"its box {i}, {list(box)}, is outside the image, {width} x {height}"
            raise UnreadableImage(shown, FIX)
        boxes.append((left, top, across, down))
    return boxes


def _number(value: Any) -> bool:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return known and math.isfinite(value) and abs(value) <= PIXELS


def collate(contract: Contract, encoded: Sequence[Encoded], size: int | None = None) -> Batch:
    """Return one batch as image.collate does, a row per box, with a Crop per row in `encodings`."""
    plain = [replace(one, encoding=one.encoding.pixels) for one in encoded]
    batch = image.collate(contract, plain, size)
    batch.encodings = tuple(one.encoding for one in encoded)
    return batch


BOXED_IMAGE = replace(
    IMAGE,
    encode=encode,
    collate=collate,
    requested=("image", "boxes"),
    example="photo.jpg --pair '[[20, 10, 120, 300]]'",
)
