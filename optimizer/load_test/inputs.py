"""Choose the inputs of a load test: lines of a file, or inputs that any model of the kind takes."""

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
from optimizer.harness.server.model import TENSORS
from optimizer.load_test.open_loop import Client

IMAGES = 8  # images of noise, where no files are given


@dataclass(frozen=True)
class RequestInputs:
    """A load test's distinct inputs of one column, "text" or "image"; an image is a file in
    base64."""

    column: str
    values: Sequence[str]


async def choose_inputs(client: Client, model: str, lines: Sequence[str]) -> RequestInputs:
    """Choose a load test's inputs, of the kind that the model takes. Raises InputError for a model
    of another kind, DataError for an image that cannot be read. lines: texts, or paths of images;
    empty: neutral texts, or noise of the model's image size."""
    names = [str(entry["name"]) for entry in await client.inputs(model)]
    column = names[0] if names else TEXT.columns[0]
    if column == IMAGE.columns[0]:
        values = [_encode(line) for line in lines] or await _noise(client, model)
    elif column == TEXT.columns[0]:
        values = list(lines or NEUTRAL)
    else:
        raise InputError(
            f"the model takes {', '.join(names)}",
            where=client.url,
            accepted="a model of texts or of images",
        )
    return RequestInputs(column, list(dict.fromkeys(values)))


def _encode(path: str) -> str:
    try:
        return IMAGE.sent(path)
    except HarnessInputError as e:
        raise DataError(e.problem, where=e.where) from None


async def _noise(client: Client, model: str) -> list[str]:
    """Return, as a load test's inputs, images of noise: BMP files, which need no decompression, in
    base64."""
    (tensor,) = await client.inputs(model + TENSORS)
    height, width = (int(size) for size in tensor["shape"][-2:])
    random = np.random.default_rng(0)
    return [
        base64.b64encode(bmp(random.integers(0, 256, (height, width, 3), np.uint8))).decode()
        for _ in range(IMAGES)
    ]


def bmp(pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> bytes:
    """Return a load test's image (height, width, 3) as the bytes of a BMP file: rows from the
    bottom, each padded to a multiple of 4 bytes."""
    height, width, _ = pixels.shape
    rows = np.zeros((height, -(-3 * width // 4) * 4), np.uint8)
    rows[:, : 3 * width] = pixels[::-1].reshape(height, -1)
    offset = 14 + 40  # bytes of the file header and of BITMAPINFOHEADER
    file = struct.pack("<2sIHHI", b"BM", offset + rows.size, 0, 0, offset)
    info = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, 0, rows.size, 0, 0, 0, 0)
    return file + info + rows.tobytes()
