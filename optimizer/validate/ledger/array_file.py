"""Store arrays in a temporary file, and read each when it is needed.

Correct runs of a decoder take several times the model's memory: logits over the vocabulary for
every token, run and arithmetic. A limit follows from two arrays at a time. Used by
limits/correct_runs.py.
"""

from __future__ import annotations

import tempfile
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from optimizer.validate.ledger.distance import Array


class ArrayFile:
    """A temporary file of traces' arrays without a name in the file system, removed with this
    object.

    folder: folder on the disk to use; None: the folder for temporary files
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._file = tempfile.TemporaryFile(  # noqa: SIM115 - closed with this object
            dir=folder, buffering=0
        )
        weakref.finalize(self, self._file.close)
        self._place = threading.Lock()  # of the file's position: runs in threads put their arrays

    def put(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        """Move large arrays of traces to the file and return {name: array}, which reads an array
        from the file on every access.

        Raises OSError where the file cannot be written.
        """
        places = {name: (self._write(a), a.dtype, a.shape) for name, a in arrays.items()}
        return LazyArrays(places, lambda name: self._read(*places[name]))

    def _write(self, array: Array) -> int:
        """Append an array of a trace to the file and return its offset in bytes."""
        left = _bytes(np.ascontiguousarray(array))
        with self._place:
            place = self._file.seek(0, 2)
            while left:  # one call writes 2 GB at most
                left = left[self._file.write(left) :]
        return place

    def _read(self, place: int, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> Array:
        array: Array = np.empty(shape, dtype)
        left = _bytes(array)
        with self._place:
            self._file.seek(place)
            while left:
                count = self._file.readinto(left)
                if not count:
                    raise OSError("the file of arrays is shorter than the arrays written to it")
                left = left[count:]
        return array


def _bytes(array: Array) -> memoryview:
    """Return the bytes of a trace's array, which must be contiguous, without copying it."""
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


class LazyArrays(Mapping[str, Array]):
    """A mapping of traces' {name: array} that calls read(name) on every access instead of holding
    arrays.

    names: names of the arrays
    read: function name -> array
    """

    def __init__(self, names: Collection[str], read: Callable[[str], Array]) -> None:
        self._names, self._read = names, read

    def __getitem__(self, name: str) -> Array:
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def join_arrays(parts: Sequence[Mapping[str, Array]]) -> Mapping[str, Array]:
    """Join traces' mappings {name: array} into one without reading the arrays; of a name that
    occurs twice the last counts."""
    owners = {name: part for part in parts for name in part}
    return LazyArrays(owners, lambda name: owners[name][name])
