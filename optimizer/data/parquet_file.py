"""Check the size of a Parquet file before `datasets` reads it into a table.

A small file can expand enormously: 50 million equal strings are stored as one string and a count.
So the numbers of columns, rows and bytes are read from the footer, and then the columns themselves,
a few rows at a time, until the limit is exceeded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import DataError
from optimizer.foundation.reading import reading
from optimizer.recipe.schema import DataSpec

ROWS = 5_000_000  # maximum per file; each becomes a Python object of about 1 kB
VALUE = 64_000_000  # maximum bytes of a text or an image, as for a line of a csv file
TOGETHER = 100  # rows decoded at once
BUFFER = 1 << 20  # bytes of the file read at once


def find_common_columns(files: Sequence[str], spec: DataSpec) -> list[str]:
    """Return the spec's column names, sorted, if every file has them, so that only they are read.
    Else return [], so that all are read and the message about the missing column can list them."""
    columns = set(spec.columns.values())
    for file in map(Path, files):
        with reading(file, error=DataError):
            if not columns <= set(_open_parquet(file).schema_arrow.names):
                return []
    return sorted(columns)


def measure_sizes(file: Path, columns: Sequence[str] | None, most: int) -> Iterator[int]:
    """Yield decompressed sizes of a data set's Parquet file in bytes: first the total in the
    footer, then the bytes read so far after every TOGETHER rows.

    columns: names of the columns to read; None for all
    most: maximum number of columns, nested ones included

    Raises DataError for more columns, too many rows, and a value that is too long.
    """
    parquet = _open_parquet(file)
    footer = parquet.metadata
    _check(footer.num_columns, most, "columns", file, "Remove the unused columns.")
    _check(footer.num_rows, ROWS, "rows", file, "Use fewer rows, or split the file.")
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
            values = _decode(column)
            if _longest(values) > VALUE:
                raise _too_long(name, file)
            total += values.nbytes
        yield total


def _open_parquet(file: Path) -> Any:
    from pyarrow import parquet

    return parquet.ParquetFile(file, buffer_size=BUFFER)


def _decode(column: Any) -> Any:
    """Return a Parquet file's column with dictionary encoding resolved to values."""
    from pyarrow import types

    return column.dictionary_decode() if types.is_dictionary(column.type) else column


def _longest(column: Any) -> int:
    """Return the bytes of the longest value of a Parquet file's column; for lists the bytes of all
    values, an upper bound."""
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
        fix="Check that it is the right column; if so, shorten its texts.",
    )
