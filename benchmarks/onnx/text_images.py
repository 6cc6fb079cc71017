"""Images of text for detectors of text, whose answer to drawn noise is 0 everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of the channels, as PaddleOCR's configurations have them."""
WORDS = (
    "invoice",
    "Total: 48.20",
    "No. 1337",
    "exit",
    "Open 9-17",
    "platform 4",
    "made in",
    "SALE",
)
SMALLEST, LARGEST = 12, 28  # pixels of a line's height


def draw(count: int, side: int, seed: int) -> NDArray[Any]:
    """Draw square images of a few lines of text, normalised: float32 (count, 3, side, side)."""
    rng = np.random.default_rng(seed)
    images = np.stack([np.asarray(_image(side, rng), np.float32) / 255 for _ in range(count)])
    normal = (images - np.float32(MEAN)) / np.float32(DEVIATION)
    return np.ascontiguousarray(normal.transpose(0, 3, 1, 2))


def _image(side: int, rng: np.random.Generator) -> Image.Image:
    """An image whose text differs from its noisy background by about half the range of colours."""
    paper = rng.integers(0, 256, 3)
    ink = (paper + 128 + rng.integers(-40, 41, 3)) % 256
    noise = rng.normal(0, rng.uniform(0, 8), (side, side, 3))
    image = Image.fromarray(np.clip(paper + noise, 0, 255).astype(np.uint8))
    canvas, top = ImageDraw.Draw(image), int(rng.integers(0, SMALLEST))
    while top < side - SMALLEST:
        size, left = int(rng.integers(SMALLEST, LARGEST)), int(rng.integers(0, side // 4))
        font = ImageFont.load_default(size)
        canvas.text((left, top), str(rng.choice(WORDS)), tuple(ink.tolist()), font=font)
        top += size + int(rng.integers(2, SMALLEST))
    return image
