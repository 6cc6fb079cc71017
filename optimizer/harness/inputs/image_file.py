"""From the bytes of an image file, or an array, to 8-bit pixels in the channels a model reads.

As transformers' image processors have them, where those take an image at all: turned as EXIF says,
transparent pixels laid on white, then RGB. Models of one channel get Pillow's grey ("L"). Of 16
bits the upper eight are kept, grey or colour (Pillow does so for colour). Colour profiles are not
applied, as transformers does not apply them either.
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
BEHIND = "MPO"
"""What Pillow calls a JPEG with further pictures behind the photo, as telephones write them."""
NAMED = "a JPEG, PNG, WebP or BMP file of one image"
PIXELS = 1 << 26  # of an image, 8192 x 8192: more is refused before it is decoded
BYTES = 1 << 29  # of a file
GREYS = ("I", "I;16", "I;16L", "I;16B")
MODES = {1: "L", 3: "RGB"}


class UnreadableImage(Exception):
    """Why an image cannot be read, as a clause, and what to do about it."""

    def __init__(self, problem: str, fix: str) -> None:
        super().__init__(problem)
        self.problem, self.fix = problem, fix


def library() -> Any:
    """Pillow's module Image. Raises MachineError where it is not installed."""
    try:
        from PIL import Image
    except ImportError:
        raise MachineError(
            "Pillow, which reads images, is not installed",
            where="images",
            fix="Run: pip install pillow",
        ) from None
    return Image


def pixels(source: Any, channels: int) -> Any:
    """A Pillow image, RGB or of one channel, of a path, the bytes of a file or an array.

    An array is uint8 or uint16, (height, width) or (height, width, 1, 3 or 4), the fourth being
    opacity. Raises UnreadableImage.
    """
    if isinstance(source, np.ndarray):
        return _in_channels(_of_array(source), channels)
    if isinstance(source, bytes | bytearray | memoryview):
        return _of_file(io.BytesIO(source), channels)
    if not isinstance(source, str | Path):
        raise UnreadableImage(
            f"{type(source).__name__} is no image", f"Give a path, bytes or an array of {NAMED}."
        )
    path = Path(source)
    try:
        if not path.is_file():
            problem = "it is no file" if path.exists() else "there is no such file"
            raise UnreadableImage(problem, f"Give the path of {NAMED}.")
        if path.stat().st_size > BYTES:
            raise UnreadableImage(f"it has more than {BYTES:,} bytes", f"Give {NAMED}.")
        with path.open("rb") as file:
            return _of_file(file, channels)
    except (OSError, ValueError) as e:  # a name with a zero byte, no permission
        raise UnreadableImage(f"it cannot be read ({e})", f"Give the path of {NAMED}.") from None


def _of_file(file: Any, channels: int) -> Any:
    from PIL import ImageOps, UnidentifiedImageError

    image = library()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large sizes and odd metadata: judged here
            opened = image.open(file, formats=FORMATS)
            _check_size(*opened.size)
            if opened.format != BEHIND and getattr(opened, "n_frames", 1) > 1:
                raise UnreadableImage(
                    f"it holds {opened.n_frames} images, an animation", "Give one of its images."
                )
            opened.load()
            ImageOps.exif_transpose(opened, in_place=True)
            return _in_channels(opened, channels)
    except UnreadableImage:
        raise
    except UnidentifiedImageError:
        raise UnreadableImage(
            "it is no image of a format that is read here", f"Give {NAMED}."
        ) from None
    except image.DecompressionBombError:
        raise _too_large("more") from None
    except MemoryError:
        raise UnreadableImage("it does not fit into memory", "Make it smaller.") from None
    except Exception as e:  # each decoder fails in its own way on damaged data
        why = str(e).splitlines()[0][:120] if str(e) else type(e).__name__
        raise UnreadableImage(
            f"its data are damaged or cut off ({why})", "Get the file again."
        ) from None


def _check_size(width: int, height: int) -> None:
    if width * height > PIXELS:
        raise _too_large(f"{width:,} x {height:,}")


def _too_large(size: str) -> UnreadableImage:
    return UnreadableImage(f"it has {size} pixels; up to {PIXELS:,} are read", "Make it smaller.")


def _of_array(array: Array) -> Any:
    image = library()
    shape = array.shape
    fits = array.ndim == 2 or (array.ndim == 3 and shape[2] in (1, 3, 4))
    if not fits or not array.size or array.dtype not in (np.uint8, np.uint16):
        raise UnreadableImage(
            f"an array of {array.dtype} {shape} is no image",
            "Give uint8 or uint16, (height, width) or (height, width, 1, 3 or 4).",
        )
    _check_size(shape[1], shape[0])
    if array.dtype == np.uint16:
        array = (array >> 8).astype(np.uint8)
    array = array[..., 0] if array.ndim == 3 and shape[2] == 1 else array
    return image.fromarray(np.ascontiguousarray(array))


def _in_channels(opened: Any, channels: int) -> Any:
    """In mode L or RGB."""
    image = library()
    if opened.mode in GREYS:
        values = np.asarray(opened)
        if values.min() < 0 or values.max() > 65_535:
            raise UnreadableImage("its values need more than 16 bits", "Save it with 8 or 16.")
        opened = image.fromarray((values >> 8).astype(np.uint8))
    if "A" in opened.getbands() or opened.info.get("transparency") is not None:
        opened = opened.convert("RGBA")
        white = image.new("RGBA", opened.size, (255, 255, 255, 255))
        opened = image.alpha_composite(white, opened).convert("RGB")
    mode = MODES[channels]
    return opened if opened.mode == mode else opened.convert(mode)
