"""Read images from columns of paths, file contents, or Image features of library `datasets`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import DataError
from optimizer.foundation.reading import reading
from optimizer.harness.inputs.image_file import BYTES

ACCEPTED = "the path of an image file, relative to the data spec, or its bytes"


@dataclass(frozen=True)
class Picture:
    """Image of a data set's row."""

    name: str  # file name, or the row's place
    sha256: str  # digest of the file's bytes
    source: Path | bytes  # path of the file, or its bytes


def disable_decoding(table: Any, column: str) -> Any:
    """Return `table` with bytes or paths in `column` in place of decoded images, because the
    harness decodes them."""
    import datasets

    feature = table.features[column]
    if not isinstance(feature, datasets.Image):
        return table
    return table.cast_column(column, datasets.Image(decode=False))


def read_picture(value: Any, base: str, where: str) -> Picture:
    """Return the Picture in a column's value: a path, a file's bytes, or {"bytes", "path"} of
    `datasets`.

    base: folder of the data spec
    where: the row, for messages

    Raises DataError for any other value, and for a file that is missing or too large.
    """
    if isinstance(value, Mapping):  # as `datasets` has them: either may be null
        content, path = value.get("bytes"), value.get("path")
        value = content if content is not None else path
    if isinstance(value, bytes):
        return Picture(where, hashlib.sha256(value).hexdigest(), value)
    if not isinstance(value, str) or not value:
        raise DataError(f"{str(value)[:80]!r} is not an image", where=where, accepted=ACCEPTED)
    file = Path(base or ".") / value
    with reading(where, error=DataError):
        if not file.is_file():
            raise DataError(f"file {value!r} does not exist", where=where, accepted=ACCEPTED)
        if file.stat().st_size > BYTES:
            raise DataError(
                f"{value!r} has more than {BYTES:,} bytes", where=where, accepted="a smaller file"
            )
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
    return Picture(str(value), digest, file)
