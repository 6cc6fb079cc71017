"""Load an image file or array as a Pillow image, L or RGB as the model takes.

Pixels equal those of transformers' image processors for all images that these accept: rotated by
EXIF, transparency blended onto white, then RGB. Models with one channel get Pillow's grey ("L").
16-bit values keep their upper 8 bits, as in Pillow. Colour profiles are ignored, as there.
"""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import MachineError
from .batch import Array

FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
MULTI_PICTURE = "MPO"
"""Pillow's format of a JPEG with more pictures after the photo, which phones write."""
NAMED = "a JPEG, PNG, WebP or BMP file of one image"
PIXELS = 1 << 26  # maximum pixels, 8192 x 8192; larger images are refused before decoding
BYTES = 1 << 29  # maximum bytes of a file
GREYS = ("I", "I;16", "I;16L", "I;16B")
MODES = {1: "L", 3: "RGB"}


class UnreadableImage(Exception):
    """An input image that cannot be read.

    problem: the reason, as a clause.
    fix: remedy, as a sentence.
    """

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem)
        self.problem, self.fix = problem, fix


def import_pillow() -> Any:
    """Return Pillow's module Image, which decodes input images. Raises MachineError if it is not
    installed."""
    try:
        from PIL import Image
    except ImportError:
        raise MachineError(
            "Pillow, which reads images, is not installed",
            where="images",
            fix="Run: pip install pillow",
        ) from None
    return Image


def load_image(source: Any, channels: int) -> Any:
    """Open an input image as a Pillow image with `channels` channels: 1, grey, or 3, RGB.

    source: path, bytes of a file, or an array, uint8 or uint16, (height, width) or (height, width,
        1, 3 or 4); the fourth channel is opacity.
    Raises UnreadableImage.
    """
    if isinstance(source, np.ndarray):
        return _convert(_open_array(source), channels)
    if isinstance(source, bytes | bytearray | memoryview):
        return _open_file(io.BytesIO(source), channels)
    if not isinstance(source, str | Path):
        raise UnreadableImage(
            f"{type(source).__name__} is not an image",
            f"Give a path, bytes or an array of {NAMED}.",
        )
    path = Path(source)
    try:
        if not path.is_file():
            problem = "it is not a file" if path.exists() else "the file does not exist"
            raise UnreadableImage(problem, f"Give the path of {NAMED}.")
        if path.stat().st_size > BYTES:
            raise UnreadableImage(f"it has more than {BYTES:,} bytes", f"Give {NAMED}.")
        with path.open("rb") as file:
            return _open_file(file, channels)
    except (OSError, ValueError) as e:  # a name with a zero byte, no permission
        raise UnreadableImage(f"it cannot be read ({e})", f"Give the path of {NAMED}.") from None


def read_sides(source: Any) -> tuple[int, int]:
    """Return two sides of an input image in pixels, in either order, from its header alone.

    (0, 0) for an image that `load_image` refuses.

    source: path, bytes of a file, or an array
    """
    if isinstance(source, np.ndarray):
        return (int(source.shape[0]), int(source.shape[1])) if source.ndim > 1 else (0, 0)
    image = import_pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            file = io.BytesIO(source) if isinstance(source, bytes | bytearray) else source
            with image.open(file, formats=FORMATS) as opened:
                width, height = opened.size
    except Exception:  # decoders raise various classes on damaged data
        return 0, 0
    return (height, width) if width * height <= PIXELS else (0, 0)


def _open_file(file: Any, channels: int) -> Any:
    """Decode an input image's file, turned as EXIF says, in mode L (1 channel) or RGB (3).

    Raises UnreadableImage for other formats, animations, damaged data and images that are too
    large.
    """
    from PIL import ImageOps, UnidentifiedImageError

    image = import_pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # about large sizes, checked below, and unusual metadata
            opened = image.open(file, formats=FORMATS)
            _check_size(*opened.size)
            if opened.format != MULTI_PICTURE and getattr(opened, "n_frames", 1) > 1:
                raise UnreadableImage(
                    f"it is an animation of {opened.n_frames} images", "Give one of its images."
                )
            opened.load()
            ImageOps.exif_transpose(opened, in_place=True)
            return _convert(opened, channels)
    except UnreadableImage:
        raise
    except UnidentifiedImageError:
        raise UnreadableImage("its format is not supported", f"Give {NAMED}.") from None
    except image.DecompressionBombError:
        raise _too_large("more") from None
    except MemoryError:
        raise UnreadableImage("it does not fit into memory", "Make it smaller.") from None
    except Exception as e:  # decoders raise various classes on damaged data
        why = str(e).splitlines()[0][:120] if str(e) else type(e).__name__
        raise UnreadableImage(
            f"its data are damaged or truncated ({why})", "Get the file again."
        ) from None


def _check_size(width: int, height: int) -> None:
    if width * height > PIXELS:
        raise _too_large(f"{width:,} x {height:,}")


def _too_large(size: str) -> UnreadableImage:
    return UnreadableImage(
        f"it has {size} pixels; up to {PIXELS:,} are accepted", "Make it smaller."
    )


def _open_array(array: Array) -> Any:
    image = import_pillow()
    shape = array.shape
    fits = array.ndim == 2 or (array.ndim == 3 and shape[2] in (1, 3, 4))
    if not fits or not array.size or array.dtype not in (np.uint8, np.uint16):
        raise UnreadableImage(
            f"an array of {array.dtype} {shape} is not an image",
            "Give uint8 or uint16, (height, width) or (height, width, 1, 3 or 4).",
        )
    _check_size(shape[1], shape[0])
    if array.dtype == np.uint16:
        array = (array >> 8).astype(np.uint8)
    array = array[..., 0] if array.ndim == 3 and shape[2] == 1 else array
    return image.fromarray(np.ascontiguousarray(array))


def _convert(opened: Any, channels: int) -> Any:
    """Convert an input image (Pillow's) to one in mode L (1 channel) or RGB (3), transparency on
    white."""
    image = import_pillow()
    if opened.mode in GREYS:
        values = np.asarray(opened)
        if values.min() < 0 or values.max() > 65_535:
            raise UnreadableImage("its values need more than 16 bits", "Save it with 8 or 16 bits.")
        opened = image.fromarray((values >> 8).astype(np.uint8))
    if "A" in opened.getbands() or opened.info.get("transparency") is not None:
        opened = opened.convert("RGBA")
        white = image.new("RGBA", opened.size, (255, 255, 255, 255))
        opened = image.alpha_composite(white, opened).convert("RGB")
    mode = MODES[channels]
    return opened if opened.mode == mode else opened.convert(mode)
