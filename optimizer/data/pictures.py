"""Images in data sets: columns of paths, of bytes of files, and of `datasets` Image features."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import DataError
from optimizer.foundation.reading import reading
from optimizer.harness.inputs.image_file import BYTES

ACCEPTED = "the path of an image, relative to the data spec, or the bytes of its file"


@dataclass(frozen=True)
class Picture:
    """An image of a row. name: of its file, or its place; sha256: of the file's bytes; source: the
    file's path, or its bytes."""

    name: str
    sha256: str
    source: Path | bytes


def undecoded(table: Any, column: str) -> Any:
    """The table with a column of images as the bytes or paths of their files, so that nothing but
    the harness decodes them."""
    import datasets

    feature = table.features[column]
    if not isinstance(feature, datasets.Image):
        return table
    return table.cast_column(column, datasets.Image(decode=False))


def picture(value: Any, base: str, where: str) -> Picture:
    """Of a cell. base: the folder of the data spec; where: the row, for messages. Raises DataError
    for what is neither a path nor bytes, and a file that cannot be read."""
    if isinstance(value, Mapping):  # as `datasets` has an image: either may be null
        content, path = value.get("bytes"), value.get("path")
        value = content if content is not None else path
    if isinstance(value, bytes):
        return Picture(where, hashlib.sha256(value).hexdigest(), value)
    if not isinstance(value, str) or not value:
        raise DataError(f"{str(value)[:80]!r} is no image", where=where, accepted=ACCEPTED)
    file = Path(base or ".") / value
    with reading(where, error=DataError):
        if not file.is_file():
            raise DataError(f"there is no file {value!r}", where=where, accepted=ACCEPTED)
        if file.stat().st_size > BYTES:
            raise DataError(
                f"{value!r} has more than {BYTES:,} bytes", where=where, accepted="a smaller file"
            )
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
    return Picture(str(value), digest, file)
