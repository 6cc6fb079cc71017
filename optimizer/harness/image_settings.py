"""What is done to an image before a model reads it: the section `image` of a contract.

    v  a value 0..255 of the image, decoded, turned, resized and cropped; c its channel
    x  = float32(v * rescale) - offset          rescale null: v
    x  = (x - mean[c]) / std[c]                 mean and std null: x
    x  = x / divide[c]                          divide null: x

in float32, but for the first product, which is rounded to float32 from float64: so transformers'
image processors compute it without torchvision, and so it is here, to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import require

FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""As Pillow numbers them, from 0; all but the first blur before they shrink (antialiasing)."""
RESIZES = (("height", "width"), ("shortest_edge",))
LARGEST = 16_384  # of a side


@dataclass(frozen=True)
class ImageSettings:
    """channels: 3 for colour (RGB), 1 for grey. height, width: of what the model reads. resize:
    {"height", "width"} whatever the proportions, {"shortest_edge"} keeping them, or null. resample:
    its filter. crop: [height, width] around the centre, where a smaller image gets black (0)
    around it; null: nothing is cropped. The others: see the module's docstring."""

    channels: int
    height: int
    width: int
    resize: Mapping[str, int] | None
    resample: str
    crop: tuple[int, int] | None
    rescale: float | None
    offset: float
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    divide: tuple[float, ...] | None

    def __post_init__(self) -> None:
        require(self.channels in (1, 3), "image.channels", self.channels, "1 or 3")
        require(self.resample in FILTERS, "image.resample", self.resample, ", ".join(FILTERS))
        kinds = " or ".join(" and ".join(names) for names in RESIZES)
        keys = None if self.resize is None else tuple(sorted(self.resize))
        require(keys is None or keys in RESIZES, "image.resize", self.resize, f"{kinds}; or null")
        sides = [self.height, self.width, *(self.resize or {}).values(), *(self.crop or ())]
        fits = all(1 <= side <= LARGEST for side in sides)
        require(fits, "image", sides, f"sides of 1 to {LARGEST} pixels")
        require(
            (self.mean is None) == (self.std is None), "image.std", self.std, "one where mean is"
        )
        for name in ("mean", "std", "divide"):
            values = getattr(self, name)
            where, accepted = f"image.{name}", f"{self.channels} numbers; or null"
            require(values is None or len(values) == self.channels, where, values, accepted)
        for name in ("std", "divide"):
            values = getattr(self, name)
            require(not values or all(values), f"image.{name}", values, "numbers other than 0")
        require(self._size == (self.height, self.width), "image", self._size, self._accepted)

    @property
    def _size(self) -> tuple[int, ...] | None:
        """Of every image after resizing and cropping; None where they differ."""
        if self.crop is not None:
            return tuple(self.crop)
        resize = self.resize or {}
        return (resize["height"], resize["width"]) if "height" in resize else None

    @property
    def _accepted(self) -> str:
        return f"a resize or crop that makes every image {self.height} x {self.width}"

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> ImageSettings:
        """Of the JSON in a contract."""
        lists = {n: v if v is None else tuple(v) for n, v in document.items() if n in TUPLES}
        return cls(**{**document, **lists})


TUPLES = ("crop", "mean", "std", "divide")
