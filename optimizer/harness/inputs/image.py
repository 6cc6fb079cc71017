"""Encode images into float32 arrays (batch, channels, height, width)."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InputError
from ..image_settings import FILTERS, LINEAR, ImageSettings
from .batch import Array, Batch
from .image_file import PIXELS, UnreadableImage, import_pillow, load_image
from .kind import Encoded, InputKind

if TYPE_CHECKING:
    from ..contract import Contract

ARRAY = "pixel_values"
TIMED = 8  # default images for timing


def encode(
    contract: Contract,
    _encoder: None,
    images: Sequence[Any],
    pairs: Sequence[Any] | None = None,
    size: int | None = None,
) -> list[Encoded]:
    """Decode, resize and crop each input image to uint8 (height, width, channels).

    images: paths, file contents as bytes, or arrays (see image_file.load_image). An image that
        cannot be read gets a `problem`.
    size: ignored, because all images have one size.
    Raises InputError without images and for pairs, MachineError without Pillow.
    """
    del size
    import_pillow()
    check_some(images)
    if pairs is not None and any(pair is not None for pair in pairs):
        raise InputError("pairs of images are not supported", where="pairs")
    return [_encoded(contract.images, image) for image in images]


def check_some(images: Sequence[Any]) -> None:
    """Raise InputError without input images."""
    if not len(images):
        raise InputError("no image was given", where="images", accepted="one image or more")


def _encoded(settings: ImageSettings, source: Any) -> Encoded:
    try:
        pixels, sides = prepare(settings, source)
        return Encoded(source, pixels, size=1, sides=sides)
    except UnreadableImage as e:
        return Encoded(source, None, size=1, problem=e.problem, fix=e.fix)


def prepare(settings: ImageSettings, source: Any) -> tuple[Array, tuple[int, int]]:
    """Return an input image's pixels, uint8 (height, width, channels), before rescaling, and its
    height and width before resizing, turned as EXIF says.

    Raises UnreadableImage.
    """
    image = load_image(source, settings.channels)
    sides = image.size[1], image.size[0]
    if settings.letterbox is not None:
        return _letterbox(settings, image, sides), sides
    size = _resized_size(settings, *image.size)
    if size is not None and size[0] * size[1] > PIXELS:
        raise UnreadableImage(
            f"it is {image.size[0]} x {image.size[1]}, and {size[0]:,} x {size[1]:,} once its "
            f"shorter side is resized; up to {PIXELS:,} pixels are accepted",
            "Crop it to an aspect ratio nearer to 1.",
        )
    array = _resize(image, size, settings.resample)
    return array if settings.crop is None else _center_crop(array, *settings.crop), sides


def _letterbox(settings: ImageSettings, image: Any, sides: tuple[int, int]) -> Array:
    """Resize an input image (Pillow's) into the model's input size, and fill what it leaves."""
    (height, width), (top, left) = settings.place(sides)
    shape = settings.height, settings.width, settings.channels
    frame = np.full(shape, settings.letterbox.fill if settings.letterbox else 0, np.uint8)
    pixels = _resize(image, (width, height), settings.resample)
    frame[top : top + height, left : left + width] = pixels
    return frame


def _resize(image: Any, size: tuple[int, int] | None, resample: str) -> Array:
    """Resize an input, a Pillow image; return uint8 (height, width, channels).

    size: width and height; None: unchanged
    """
    if size is not None and resample != LINEAR:
        image = image.resize(size, resample=FILTERS.index(resample))
    array = np.asarray(image)
    array = array[..., None] if array.ndim == 2 else array
    if size is None or resample != LINEAR:
        return array
    values = array.astype(np.float32)
    for axis, new in enumerate((size[1], size[0])):
        old = array.shape[axis]
        places = ((np.arange(new) + 0.5) * (old / new) - 0.5).clip(0, old - 1)
        low = places.astype(np.int64)
        high = np.minimum(low + 1, old - 1)
        share = (places - low).astype(np.float32)[:, None]
        share = share[..., None] if axis == 0 else share
        values = values.take(low, axis) * (1 - share) + values.take(high, axis) * share
    return np.asarray(np.rint(values), np.uint8)


def _resized_size(settings: ImageSettings, width: int, height: int) -> tuple[int, int] | None:
    """Return (width, height) of an input image after resizing; None if it is not resized."""
    if settings.resize is None:
        return None
    if "shortest_edge" not in settings.resize:
        return settings.resize["width"], settings.resize["height"]
    short, long = min(width, height), max(width, height)
    new = settings.resize["shortest_edge"]
    longer = int(new * long / short)
    return (new, longer) if width <= height else (longer, new)


def _center_crop(array: Array, height: int, width: int) -> Array:
    """Return the centre of an input image (height, width, channels), padded with 0 if it is
    smaller.

    Rounds like transformers' center_crop: the extra pixel of an odd difference is cropped at the
    end, and padded at the beginning.
    """
    rows, columns = array.shape[:2]
    canvas = np.zeros((max(rows, height), max(columns, width), array.shape[2]), np.uint8)
    above, before = -((rows - len(canvas)) // 2), -((columns - canvas.shape[1]) // 2)
    canvas[above : above + rows, before : before + columns] = array
    top, left = (rows - height) // 2 + above, (columns - width) // 2 + before
    return canvas[max(0, top) : top + height, max(0, left) : left + width]


@lru_cache(maxsize=16)
def value_table(
    rescale: float | None,
    offset: float,
    mean: tuple[float, ...] | None,
    std: tuple[float, ...] | None,
    divide: tuple[float, ...] | None,
) -> Array:
    """Return, for the input of an image, the normalized value of each of the 256 pixel values,
    float32 (256, channels or 1).

    The parameters are the fields of image_settings.py, which has the formula.
    """
    x = np.arange(256, dtype=np.float64)[:, None]
    x = (x if rescale is None else x * rescale).astype(np.float32)
    x = x - np.float32(offset)
    if mean is not None and std is not None:
        x = (x - np.array(mean, np.float32)) / np.array(std, np.float32)
    return x if divide is None else x / np.array(divide, np.float32)


def collate(contract: Contract, encoded: Sequence[Encoded], size: int | None = None) -> Batch:
    """Join encoded images to one input batch, {the first input: float32 (batch, channels, height,
    width)}."""
    del size
    s = contract.images
    values = value_table(s.rescale, s.offset, s.mean, s.std, s.divide)
    array = np.empty((len(encoded), s.channels, s.height, s.width), np.float32)
    for row, one in zip(array, encoded, strict=True):
        for channel in range(s.channels):
            column = values[:, min(channel, values.shape[1] - 1)]
            read = s.channels - 1 - channel if s.bgr else channel
            np.take(column, one.encoding[..., read], out=row[channel], mode="clip")
    inputs, encodings = [e.input for e in encoded], [e.encoding for e in encoded]
    return Batch(
        {contract.inputs[0].name: array}, inputs, encodings, sides=[e.sides for e in encoded]
    )


def read_received(data: bytes, textual: bool) -> bytes:
    """Return the bytes of an input image's file from a request.

    data: the file, or its base64
    textual: true for base64, as JSON holds it

    Raises ValueError for invalid base64.
    """
    return base64.b64decode(data, validate=True) if textual else data


def encode_sent(path: str) -> str:
    """Return an input image's file at `path` in base64, the inverse of `read_received`.

    Raises InputError for a file that cannot be read.
    """
    try:
        return base64.b64encode(Path(path).read_bytes()).decode()
    except OSError as e:
        raise InputError(f"the image cannot be read ({e.strerror})", where=path) from None


def draw_noise(contract: Contract) -> list[Array]:
    """Return images of noise in the model's input size, for timing."""
    s = contract.images
    rng = np.random.default_rng(0)
    shape = (s.height, s.width, s.channels)
    return [rng.integers(0, 256, shape, dtype=np.uint8) for _ in range(TIMED)]


IMAGE = InputKind(
    name="image",
    encode=encode,
    collate=collate,
    parse=Path,
    received=read_received,
    sent=encode_sent,
    arrays=(ARRAY,),
    sections=("image",),
    columns=("image",),
    requires=("pillow",),
    example="photo.jpg",
    neutral=draw_noise,
)
IMAGE_OF_FILE = replace(IMAGE, arrays=())
"""Image for a model whose input has any name."""
