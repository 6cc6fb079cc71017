"""What a data set's images are once they are prepared: can the model tell them apart?"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from optimizer.data.datasets import Sample
from optimizer.foundation.errors import DataError
from optimizer.harness.contract import Contract
from optimizer.harness.inputs.image import prepare
from optimizer.harness.inputs.image_file import UnreadableImage

FEWEST = 3  # as of texts: one alone, and two beside each other


@dataclass(frozen=True)
class ImageSense:
    """images: different files. rows: different ones after resizing and cropping, as the model gets
    them. shared: images that are another's too then. flat: of one colour throughout. sha256: of all
    pixels, in order."""

    images: int
    rows: int
    shared: int
    flat: int
    sha256: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    samples: Sequence[Sample], contract: Contract, encoder: None, length: int | None = None
) -> ImageSense:
    """What the images of `samples` are. Raises DataError naming one that cannot be read."""
    del encoder, length
    pictures = {s.image.sha256: s.image for s in samples if s.image is not None}
    seen: Counter[bytes] = Counter()
    whole = hashlib.sha256()
    flat = 0
    for picture in pictures.values():
        try:
            array = prepare(contract.images, picture.source)
        except UnreadableImage as e:
            raise DataError(e.problem, where=f"image {picture.name}", fix=e.fix) from None
        content = array.tobytes()
        seen[hashlib.blake2b(content, digest_size=16).digest()] += 1
        whole.update(content)
        flat += bool((array == array[:1, :1]).all())
    shared = sum(n for n in seen.values() if n > 1)
    return ImageSense(len(pictures), len(seen), shared, flat, whole.hexdigest())


def check(sense: ImageSense, name: str) -> None:
    """Raise DataError where images become the same pixels: fewer than three different ones (or one
    per image), or most share theirs. name: the place of the data in the recipe."""
    fix = "Are the image processor's sizes those of the model, and the images the ones you mean?"
    few = min(FEWEST, sense.images)
    if sense.rows < few:
        raise DataError(
            f"{sense.images} different images become {sense.rows} different ones for the model",
            where=f"{name} data",
            accepted=f"{few} different ones or more",
            fix=fix,
        )
    if 2 * sense.shared > sense.images:
        raise DataError(
            f"{sense.shared} of {sense.images} different images have the pixels of another once "
            "they are resized and cropped, so the model cannot tell them apart",
            where=f"{name} data",
            accepted="images of which most have pixels of their own",
            fix=fix,
        )


def warnings(sense: ImageSense, name: str) -> list[str]:
    """A sentence for what is odd of most images, and forbids nothing."""
    if 2 * sense.flat <= sense.images:
        return []
    return [f"{name} data: {sense.flat} of {sense.images} images are of one colour throughout"]
