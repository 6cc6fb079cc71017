"""A Parquet file, looked at before `datasets` makes a table of it.

A small file can hold much: 50 million equal strings are one string and a count. So its footer is
read first, which says how many columns, rows and bytes there are, and then the columns that are
wanted, a few rows at a time, until they are all seen or are too much.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import DataError
from optimizer.foundation.reading import reading
from optimizer.recipe.schema import DataSpec

ROWS = 5_000_000  # of a file: each becomes a Python object of about 1 kB
VALUE = 64_000_000  # bytes of a text or an image, as of a csv file's line
TOGETHER = 100  # rows that are decoded at once
BUFFER = 1 << 20  # bytes of the file that are read at once


def shared(files: Sequence[str], spec: DataSpec) -> list[str]:
    """The columns that the spec names, where each file has all of them: no other need be read.
    Empty where one has not, which a message then says with the columns that there are."""
    columns = set(spec.columns.values())
    for file in map(Path, files):
        with reading(file, error=DataError):
            if not columns <= set(_opened(file).schema_arrow.names):
                return []
    return sorted(columns)


def sizes(file: Path, columns: Sequence[str] | None, most: int) -> Iterator[int]:
    """Yield the bytes that the columns take decoded: by the footer, then as far as they are read.

    columns: names of the columns that are read; None for all.
    most: maximum number of columns, nested ones included.
    Raises DataError for more columns, for too many rows, and for a value that is too long.
    """
    parquet = _opened(file)
    footer = parquet.metadata
    _check(footer.num_columns, most, "columns", file, "Leave out the columns that are not read.")
    _check(footer.num_rows, ROWS, "rows", file, "Take a part of them, or split the file.")
    paths = [footer.schema.column(i).path for i in range(footer.num_columns)]
    read = [i for i, path in enumerate(paths) if columns is None or path.split(".")[0] in columns]
    total = 0
    for group in range(footer.num_row_groups):
        for i in read:
            chunk = footer.row_group(group).column(i)
            if chunk.total_uncompressed_size > VALUE * max(1, chunk.num_values):
                raise _too_long(paths[i], file)
            total += chunk.total_uncompressed_size
    yield total
    total = 0
    for batch in parquet.iter_batches(TOGETHER, columns=columns):
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            values = _decoded(column)
            if _longest(values) > VALUE:
                raise _too_long(name, file)
            total += values.nbytes
        yield total


def _opened(file: Path) -> Any:
    from pyarrow import parquet

    return parquet.ParquetFile(file, buffer_size=BUFFER)


def _decoded(column: Any) -> Any:
    """The values themselves: a file may keep numbers of them, one of which stands for many."""
    from pyarrow import types

    return column.dictionary_decode() if types.is_dictionary(column.type) else column


def _longest(column: Any) -> int:
    """Bytes of the longest value, or more: of all where they are lists."""
    from pyarrow import compute, types

    texts = (types.is_string, types.is_binary, types.is_large_string, types.is_large_binary)
    if any(is_text(column.type) for is_text in texts):
        return int(compute.max(compute.binary_length(column)).as_py() or 0)
    return int(column.nbytes)


def _check(count: int, most: int, what: str, file: Path, fix: str) -> None:
    if count > most:
        raise DataError(
            f"it has {count:,} {what}", where=str(file), accepted=f"{most:,} or fewer", fix=fix
        )


def _too_long(name: str, file: Path) -> DataError:
    return DataError(
        f"a value of column {name!a:.100} has more than {VALUE:,} bytes",
        where=str(file),
        accepted=f"{VALUE:,} bytes or fewer",
        fix="Is it the column you mean? If so, cut its texts.",
    )
