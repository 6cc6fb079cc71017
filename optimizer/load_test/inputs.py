"""What is asked of a model: the lines of a file, or inputs that any model of its kind takes."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from optimizer.foundation.errors import DataError, InputError
from optimizer.harness.errors import InputError as HarnessInputError
from optimizer.harness.inputs.image import IMAGE
from optimizer.harness.inputs.text import NEUTRAL, TEXT
from optimizer.harness.server.inference import TENSORS
from optimizer.load_test.open_loop import Client

IMAGES = 8  # different ones, where no files are given


@dataclass(frozen=True)
class Inputs:
    """column: "text" or "image". values: of it, each once; of images base64."""

    column: str
    values: Sequence[str]


async def of(client: Client, model: str, lines: Sequence[str]) -> Inputs:
    """Inputs of the kind that the model takes. lines: texts, or paths of images; none: neutral
    texts, or images of noise as large as the model reads them.

    Raises InputError for a model of another kind, DataError for an image that cannot be read.
    """
    names = [str(entry["name"]) for entry in await client.inputs(model)]
    column = names[0] if names else TEXT.columns[0]
    if column == IMAGE.columns[0]:
        values = [_sent(line) for line in lines] or await _noise(client, model)
    elif column == TEXT.columns[0]:
        values = list(lines or NEUTRAL)
    else:
        raise InputError(
            f"the model takes {', '.join(names)}",
            where=client.url,
            accepted="a model of texts or of images",
        )
    return Inputs(column, list(dict.fromkeys(values)))


def _sent(path: str) -> str:
    try:
        return IMAGE.sent(path)
    except HarnessInputError as e:
        raise DataError(e.problem, where=e.where) from None


async def _noise(client: Client, model: str) -> list[str]:
    """Images in BMP, whose pixels a server reads without unpacking anything."""
    (tensor,) = await client.inputs(model + TENSORS)
    height, width = (int(size) for size in tensor["shape"][-2:])
    random = np.random.default_rng(0)
    return [
        base64.b64encode(bmp(random.integers(0, 256, (height, width, 3), np.uint8))).decode()
        for _ in range(IMAGES)
    ]


def bmp(pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    """An image (height, width, 3) as a BMP file: rows from the bottom, each filled up to a multiple
    of 4 bytes."""
    height, width, _ = pixels.shape
    rows = np.zeros((height, -(-3 * width // 4) * 4), np.uint8)
    rows[:, : 3 * width] = pixels[::-1].reshape(height, -1)
    offset = 14 + 40  # the two headers: of the file, and BITMAPINFOHEADER
    file = struct.pack("<2sIHHI", b"BM", offset + rows.size, 0, 0, offset)
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, rows.size, 0, 0, 0, 0)
    return file + info + rows.tobytes()
