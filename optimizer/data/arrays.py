"""Read rows of arrays, from .npz files or from the columns of a data set that are inputs of a
model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from optimizer.foundation.errors import DataError
from optimizer.foundation.reading import reading
from optimizer.harness.inputs.tensors import ONLY, TensorRow

ALL = "*"
"""Column of field `arrays` that stands for every column without another field."""
LARGEST = 1 << 34  # bytes of the arrays of a file


@dataclass(frozen=True)
class Feature:
    """Type of a data set's column, with the attributes of a feature in library `datasets`."""

    dtype: str


class ArrayTable:
    """Rows of a data set in .npz files, with the interface of a table of library `datasets`. Each
    array has one entry per row along its first axis."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self._arrays = dict(arrays)
        self.column_names = list(arrays)
        kinds = {n: "string" if a.dtype.kind == "U" else str(a.dtype) for n, a in arrays.items()}
        self.features = {name: Feature(kind) for name, kind in kinds.items()}

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values()))) if self._arrays else 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for i in range(len(self)):
            yield {n: a[i].item() if a.ndim == 1 else a[i] for n, a in self._arrays.items()}

    def __getitem__(self, column: str) -> list[Any]:
        return list(self._arrays[column].tolist())


def open_files(files: Sequence[Path]) -> ArrayTable:
    """Open a data set's .npz files as one table, file after file. Raises DataError for other files,
    arrays of different lengths, and files with different arrays."""
    parts = [_arrays(file) for file in files]
    for file, part in zip(files[1:], parts[1:], strict=True):
        if set(part) != set(parts[0]):
            raise DataError(
                f"it has arrays {', '.join(sorted(part))}",
                where=str(file),
                accepted=f"those of {files[0].name}: {', '.join(sorted(parts[0]))}",
            )
    with reading(str(files[0]), error=DataError):
        return ArrayTable({n: np.concatenate([part[n] for part in parts]) for n in parts[0]})


def _arrays(file: Path) -> dict[str, NDArray[Any]]:
    with reading(file, error=DataError), np.load(file, allow_pickle=False) as content:
        arrays: dict[str, NDArray[Any]] = {}
        for name in content.files:
            arrays[name] = content[name]
            if sum(a.nbytes for a in arrays.values()) > LARGEST:
                raise DataError(f"its arrays have more than {LARGEST:,} bytes", where=str(file))
    lengths = {name: len(a) if a.ndim else 0 for name, a in arrays.items()}
    if not lengths or len(set(lengths.values())) > 1 or 0 in lengths.values():
        shown = ", ".join(f"{n}: {count}" for n, count in lengths.items()) or "no array"
        raise DataError(
            f"its arrays have different numbers of rows ({shown})",
            where=str(file),
            accepted="arrays whose first axis is the row, all of one length",
        )
    return arrays


def list_columns(field: str, columns: Mapping[str, str], present: Sequence[str]) -> list[str]:
    """Return the names of a data set's columns that hold a row's inputs.

    field: value of `arrays` in a data spec; ALL: every column that has no other role
    columns: {field: column} of the spec
    present: columns of the table
    """
    others = {column for name, column in columns.items() if name != "arrays"}
    return [field] if field != ALL else [name for name in present if name not in others]


def read_row(values: Mapping[str, Any], where: str, *, alone: bool) -> TensorRow:
    """Return the arrays of a data set's row.

    values: {input: value}
    where: the row, for messages
    alone: True where the value is the model's only input, whatever its column is called

    Raises DataError for a value that is not an array of numbers.
    """
    arrays = {}
    for name, value in values.items():
        try:
            array = np.asarray(value)
        except (ValueError, TypeError):
            array = np.empty(0, object)
        if array.dtype.kind not in "biuf":
            raise DataError(
                f"{str(value)[:60]!r} is not an array of numbers",
                where=f"{where}: {name}",
                accepted="numbers, or nested lists of equal length",
            )
        arrays[ONLY if alone else name] = array
    return TensorRow(arrays)
