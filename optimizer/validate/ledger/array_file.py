"""Arrays that wait in a file until they are looked at.

What correct runs of a decoder give is several times the model: logits over the whole vocabulary, of
every token, run and arithmetic. Limits follow from two arrays at a time.
"""

from __future__ import annotations

import tempfile
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import numpy as np

from optimizer.validate.ledger.distance import Array


class ArrayFile:
    """A file without a name in `folder` (None: where temporary files go), gone with this object."""

    def __init__(self, folder: Path | None = None) -> None:
        self._file = tempfile.TemporaryFile(  # noqa: SIM115 - closed with this object
            dir=folder, buffering=0
        )
        weakref.finalize(self, self._file.close)

    def put(self, arrays: Mapping[str, Array]) -> Mapping[str, Array]:
        """The same arrays, each read from the file whenever it is looked at. Raises OSError."""
        places = {name: (self._write(a), a.dtype, a.shape) for name, a in arrays.items()}
        return LazyArrays(places, lambda name: self._read(*places[name]))

    def _write(self, array: Array) -> int:
        """Where it begins."""
        place = self._file.seek(0, 2)
        rest = _bytes(np.ascontiguousarray(array))
        while rest:  # one call writes 2 GB at most
            rest = rest[self._file.write(rest) :]
        return place

    def _read(self, place: int, dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> Array:
        self._file.seek(place)
        array: Array = np.empty(shape, dtype)
        rest = _bytes(array)
        while rest:
            count = self._file.readinto(rest)
            if not count:
                raise OSError("a file of arrays is shorter than what was written there")
            rest = rest[count:]
        return array


def _bytes(array: Array) -> memoryview:
    """Of a contiguous array."""
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


class LazyArrays(Mapping[str, Array]):
    """Arrays by their names, each made by `read` whenever it is looked at."""

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
