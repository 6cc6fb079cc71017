"""Default inputs of a load test."""

import io

import numpy as np
from PIL import Image

from optimizer.load_test.inputs import bmp


def test_another_reader_finds_the_pixels_of_a_written_image() -> None:
    random = np.random.default_rng(0)
    for width in (1, 2, 3, 4, 7):  # rows are filled up to a multiple of 4 bytes
        pixels = random.integers(0, 256, (5, width, 3), np.uint8)
        read = np.asarray(Image.open(io.BytesIO(bmp(pixels))).convert("RGB"))
        assert np.array_equal(read, pixels[:, :, ::-1])  # BMP keeps blue first
