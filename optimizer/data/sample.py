"""A row of a data set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from optimizer.data.pictures import Picture


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

    def as_row(self) -> dict[str, Any]:
        """As JSON, an image by its digest."""
        row = {**vars(self)}
        image = row.pop("image")
        return row if image is None else {**row, "image": image.sha256}
