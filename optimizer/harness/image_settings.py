"""Image preprocessing settings: the section `image` of a contract.

    v  a value 0..255 of the decoded, EXIF-rotated, resized and cropped image; c its channel, in
       the order in which the model reads them
    x  = float32(v * rescale) - offset          rescale null: v
    x  = (x - mean[c]) / std[c]                 mean and std null: x
    x  = x / divide[c]                          divide null: x

All in float32, except that the first product is rounded from float64. Results are bit-identical to
transformers' image processors without torchvision; `letterbox`, `bgr` and the filter LINEAR, which
these have not, are for models that come as an ONNX file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .errors import require

FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""Pillow's resampling filters by number; all but the first antialias when they shrink."""
RESIZES = (("height", "width"), ("shortest_edge",))
LINEAR = "linear"
"""Filter between the four nearest pixels that does not antialias, as OpenCV's INTER_LINEAR."""
PLACES = ("centre", "corner")
LARGEST = 16_384  # maximum pixels of a side


@dataclass(frozen=True)
class Letterbox:
    """Part of a bundle's contract: frame around an image that keeps its proportions.

    fill: value of the frame's pixels, 0 to 255
    place: "centre", or "corner" for the upper left one
    """

    fill: int
    place: str

    def __post_init__(self) -> None:
        require(0 <= self.fill <= 255, "image.letterbox.fill", self.fill, "0 to 255")
        places = " or ".join(PLACES)
        require(self.place in PLACES, "image.letterbox.place", self.place, places)


@dataclass(frozen=True)
class ImageSettings:
    """Section `image` of a bundle's contract: preprocessing of an image.

    channels: 3 for RGB, 1 for grey
    height, width: size of the model's input in pixels
    resize: {"height", "width"} ignores the aspect ratio, {"shortest_edge"} keeps it; null: none
    resample: filter of FILTERS for resizing, or LINEAR
    crop: [height, width] of the centre crop, smaller images padded with 0; null: none
    rescale: factor of pixel values 0 to 255; null: 1
    offset: number that is then subtracted
    mean, std: mean to subtract and deviation to divide by, per channel; null: neither
    divide: last divisor, per channel; null: none
    letterbox: frame that fills the size of `resize`, which then keeps the proportions; absent: none
    bgr: true for a model that reads blue first; absent: false
    """

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
    letterbox: Letterbox | None = None
    bgr: bool = False

    def __post_init__(self) -> None:
        require(self.channels in (1, 3), "image.channels", self.channels, "1 or 3")
        filters = (*FILTERS, LINEAR)
        require(self.resample in filters, "image.resample", self.resample, ", ".join(filters))
        kinds = " or ".join(" and ".join(names) for names in RESIZES)
        keys = None if self.resize is None else tuple(sorted(self.resize))
        require(keys is None or keys in RESIZES, "image.resize", self.resize, f"{kinds}; or null")
        framed = self.letterbox is None or keys == RESIZES[0]
        require(framed, "image.resize", self.resize, "height and width, for a letterbox")
        require(self.channels == 3 or not self.bgr, "image.bgr", self.bgr, "false, for grey images")
        sides = [self.height, self.width, *(self.resize or {}).values(), *(self.crop or ())]
        fits = all(1 <= side <= LARGEST for side in sides)
        require(fits, "image", sides, f"sides of 1 to {LARGEST} pixels")
        require(
            (self.mean is None) == (self.std is None),
            "image.std",
            self.std,
            "null exactly where mean is null",
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
        """(height, width) of all images after the contract's preprocessing; None if it depends on
        the image."""
        if self.crop is not None:
            return tuple(self.crop)
        resize = self.resize or {}
        return (resize["height"], resize["width"]) if "height" in resize else None

    @property
    def _accepted(self) -> str:
        return f"a resize or crop that makes every image {self.height} x {self.width} pixels"

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ImageSettings:
        """Parse the section `image` of a contract."""
        fields: dict[str, Any] = {
            n: tuple(v) if n in TUPLES and v else v for n, v in document.items()
        }
        if fields.get("letterbox") is not None:
            fields["letterbox"] = Letterbox(**fields["letterbox"])
        return cls(**fields)

    def to_json(self) -> dict[str, Any]:
        """Return the section `image` of a contract; `from_json` is its inverse."""
        document = asdict(self)
        for name in ("letterbox", "bgr"):
            if not document[name]:
                del document[name]
        return document

    def place(self, sides: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """Place an image by the contract's settings: ((height, width), (top, left)) of an image in
        its letterbox, in pixels of the model's input.

        sides: height and width of the image
        """
        height, width = sides
        scale = min(self.height / height, self.width / width)
        new = max(1, round(height * scale)), max(1, round(width * scale))
        if self.letterbox is None or self.letterbox.place != PLACES[0]:
            return new, (0, 0)
        return new, ((self.height - new[0]) // 2, (self.width - new[1]) // 2)


TUPLES = ("crop", "mean", "std", "divide")
