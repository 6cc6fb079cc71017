"""A row of a data set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from optimizer.load.labels import normal
from optimizer.load.pictures import Picture


@dataclass(frozen=True)
class Sample:
    """One row, of a text and perhaps a second, or of an image. label: id of the class; score: a
    number for regression or similarity; words and tags: for token-classification, one tag id per
    word (text is then the words joined)."""

    text: str = ""
    text_pair: str | None = None
    label: int | None = None
    score: float | None = None
    words: tuple[str, ...] | None = None
    tags: tuple[int, ...] | None = None
    image: Picture | None = None

    @property
    def input(self) -> Any:
        """What the harness takes."""
        return self.text if self.image is None else self.image.source

    @property
    def identities(self) -> tuple[tuple[str, str], ...]:
        """(what makes an input the same as another, what to call it) of each of its inputs."""
        if self.image is not None:
            return ((self.image.sha256, self.image.name),)
        return tuple((normal(t), t) for t in (self.text, self.text_pair) if t)

    def as_row(self) -> dict[str, Any]:
        """As JSON, an image by its digest."""
        row = {**vars(self)}
        image = row.pop("image")
        return row if image is None else {**row, "image": image.sha256}
