"""Check that the images of a data set still differ after resizing and cropping."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from optimizer.data.datasets import Sample
from optimizer.data.input_sense.record import FEWEST
from optimizer.foundation.errors import DataError
from optimizer.harness.contract import Contract
from optimizer.harness.inputs.image import prepare
from optimizer.harness.inputs.image_file import UnreadableImage


@dataclass(frozen=True)
class ImageSense:
    """Counts over a data set's images, from which `check` judges them."""

    images: int  # different files
    rows: int  # different arrays after resizing and cropping
    shared: int  # images whose array equals another image's
    flat: int  # images of one colour
    sha256: str  # digest of all pixels, in order


def measure(
    samples: Sequence[Sample], contract: Contract, encoder: None, length: int | None = None
) -> ImageSense:
    """Count the images of `samples`. Raises DataError for an image that cannot be read."""
    del encoder, length
    pictures = {s.image.sha256: s.image for s in samples if s.image is not None}
    seen: Counter[bytes] = Counter()
    pixels = hashlib.sha256()
    flat = 0
    for picture in pictures.values():
        try:
            array, _ = prepare(contract.images, picture.source)
        except UnreadableImage as e:
            raise DataError(e.problem, where=f"image {picture.name}", fix=e.fix) from None
        content = array.tobytes()
        seen[hashlib.blake2b(content, digest_size=16).digest()] += 1
        pixels.update(content)
        flat += bool((array == array[:1, :1]).all())
    shared = sum(n for n in seen.values() if n > 1)
    return ImageSense(len(pictures), len(seen), shared, flat, pixels.hexdigest())


def check(sense: ImageSense, name: str) -> None:
    """Raise DataError where fewer than min(FEWEST, number of images) arrays differ, or more than
    half of the images have the same pixels as another one.

    name: place of the data in the recipe, for messages
    """
    fix = "Check that the image processor belongs to the model, and that these are your images."
    few = min(FEWEST, sense.images)
    if sense.rows < few:
        raise DataError(
            f"{sense.images} different images become {sense.rows} after resizing and cropping",
            where=f"{name} data",
            accepted=f"{few} different ones or more",
            fix=fix,
        )
    if 2 * sense.shared > sense.images:
        raise DataError(
            f"{sense.shared} of {sense.images} different images have the pixels of another after "
            "resizing and cropping, so the model cannot distinguish them",
            where=f"{name} data",
            accepted="images most of which differ",
            fix=fix,
        )


def write_warnings(sense: ImageSense, name: str) -> list[str]:
    """Return a list with one sentence where more than half of the images have a single colour, else
    []."""
    if 2 * sense.flat <= sense.images:
        return []
    return [f"{name} data: {sense.flat} of {sense.images} images have one colour"]
