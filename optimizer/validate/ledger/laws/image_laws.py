"""Check the preprocessing of images against transformers' own code.

compared   the harness's arrays with those of transformers' image processor, from the source's own
           files, and the contract's sizes with config.json; those of an ONNX file with Pillow's and
           torch's (images/prepared_pixels.py)
limit      none: equal to the bit; of the filter LINEAR, which torch rounds otherwise, one step of
           256
caught     another mean, filter or crop, red and blue exchanged, channels last:
           test_a_fault_of_the_code_is_caught,
           test_a_fault_of_the_contract_is_caught_by_its_arrays_or_answers

 1. pixels    the arrays of images of usual and of odd sizes
 2. contract  the sizes that the model was loaded with. For an architecture that accepts any size,
              `image_size` of config.json is not binding, and law 1 covers the size
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.inputs import image_file
from optimizer.harness.inputs.boxes.boxed_image import BOXED_IMAGE, Boxed
from optimizer.load.config.image_processor import open_processor
from optimizer.model.architectures.families import FAMILIES
from optimizer.validate.ledger.distance import Array
from optimizer.validate.ledger.laws.images import prepared_pixels

SIDES = ((1, 1), (3, 50), (61, 40), (200, 333))
"""Sizes that distinguish processors: one pixel, odd proportions, smaller and larger than most
models read."""
BOXES = ((1.5, 2.0, 17.25, 9.0), (-3.0, 1.0, 20.0, 90.5))
"""Boxes of each size: off whole pixels, and partly outside."""
AXES = 3  # rows up to which VitPose's processor takes those of an image for its channels


def compare_pixels(
    checkpoint: Path, source: Contract, served: Contract, encoder: Any, images: Sequence[Any]
) -> list[str]:
    """Check law 1: return a problem for each image that the harness converts to other arrays than
    transformers' image processor. The arguments are those of contract_laws.compare_tokens."""
    processor = None if tasks.look_up(source).of_file else open_processor(checkpoint)
    mode = image_file.MODES[source.images.channels]
    kind, broken = tasks.look_up(served).inputs, []
    strange: list[Any] = [*map(_strange, SIDES)]
    if kind is BOXED_IMAGE:
        strange = [Boxed(_strange(sides), BOXES) for sides in SIDES if sides[0] > AXES]
    for i, image in enumerate([*images, *strange]):
        (encoded,) = kind.encode(served, encoder, [image])
        options: dict[str, Any] = {}
        if kind is BOXED_IMAGE:
            options["boxes"] = [[part.encoding.box for part in encoded.parts]]
        opened = open_by_pillow(image, mode)
        if processor is None:
            expected = prepared_pixels.prepare(source.images, opened)
        else:
            values = processor(opened, return_tensors="np", **options)["pixel_values"]
            expected = (np.asarray(values, np.float32),)
        for name, array in kind.collate(served, encoded.parts).items():
            if not prepared_pixels.agree(array, expected):
                broken.append(f"{name} of image {i + 1}: {_difference(array, expected[0])}")
    return broken


def compare_contract(served: Contract, config: dict[str, Any]) -> list[str]:
    """Check law 2: return a problem for each size of images in the contract that differs from the
    config's.

    config: content of the checkpoint's config.json
    """
    family = FAMILIES.get(str(config.get("model_type")))
    any_size = family is not None and family.any_size
    image, size = served.images, None if any_size else config.get("image_size")
    sides = [size, size] if isinstance(size, int) else size
    wrong = []
    if sides is not None and list(sides) != [image.height, image.width]:
        wrong.append(f"images are {image.height} x {image.width}; the model's are {sides}")
    if config.get("num_channels", image.channels) != image.channels:
        wrong.append(f"{image.channels} channels; the model has {config['num_channels']}")
    return wrong


def _strange(sides: tuple[int, int]) -> Array:
    """Make an image (height, width, 3) that shows faults of pre-processing: its channels differ, it
    has edges, and it has every value."""
    rows, columns = np.indices(sides)
    planes = (rows * 7 + columns * 3, columns * 11, (rows // 3 + columns // 3) % 2 * 255)
    return np.stack([plane % 256 for plane in planes], axis=-1).astype(np.uint8)


def open_by_pillow(image: Any, mode: str) -> Any:
    """Open an image as transformers does: rotated as its EXIF data say, with transparent pixels on
    white.

    mode: Pillow's mode of the result, such as "RGB"
    """
    from PIL import Image, ImageOps

    image = image.image if isinstance(image, Boxed) else image
    if isinstance(image, np.ndarray):
        return Image.fromarray(image).convert(mode)
    opened = Image.open(io.BytesIO(image) if isinstance(image, bytes) else image)
    upright = ImageOps.exif_transpose(opened)
    if upright.mode == mode and not upright.info.get("transparency"):
        return upright
    from transformers.image_transforms import convert_to_rgb

    if upright.mode.startswith("I"):
        return Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8)).convert(mode)
    rgb = Image.fromarray(convert_to_rgb(upright, return_numpy=True))
    return rgb if mode == "RGB" else (upright if upright.mode == "L" else rgb).convert(mode)


def _difference(actual: Array, expected: Array) -> str:
    if actual.shape != expected.shape:
        return f"shape {actual.shape}, transformers {expected.shape}"
    place = tuple(int(i) for i in np.argwhere(actual != expected)[0])
    share = float((actual != expected).mean())
    return (
        f"{share:.1%} of its values differ, the first at channel {place[1]}, row {place[2]}, "
        f"column {place[3]}: {actual[place]:.6g}, transformers {expected[place]:.6g}"
    )
