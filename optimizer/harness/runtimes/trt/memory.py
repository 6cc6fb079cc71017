"""Buffers that are made once and grow: on the device, and pinned beside it."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from ...inputs.batch import Array

GROWTH = 3  # halves: by half at least, so that sizes that creep up are not bought one by one


class Memory(Protocol):
    """What is needed of a driver: see cuda.Cuda."""

    def allocate(self, size: int) -> int: ...
    def free(self, address: int) -> None: ...
    def pinned(self, size: int) -> tuple[int, Array]: ...
    def free_pinned(self, address: int) -> None: ...
    def wait(self) -> None: ...


class Device:
    """Bytes on the device that only ever grow; what was in them is lost when they do.

    An empty tensor has an address too, as the runtime wants one. Given back when nobody holds
    the object any more, as a decoder's that was only dropped.
    """

    def __init__(self, driver: Memory) -> None:
        self.address = self.size = 0
        self._driver = driver

    def room(self, size: int) -> bool:
        """At least `size` bytes; whether the address is another."""
        if self.address and size <= self.size:
            return False
        capacity = max(size, self.size * GROWTH // 2, 1)
        self.close()
        self.size = capacity
        self.address = self._driver.allocate(self.size)
        return True

    def close(self) -> None:
        if self.address:
            self._driver.wait()  # something enqueued may still use it
            self._driver.free(self.address)
        self.address = self.size = 0

    def __del__(self) -> None:
        self.close()


class Pinned:
    """Page-locked bytes that only ever grow; given back like Device's."""

    def __init__(self, driver: Memory) -> None:
        self.address = 0
        self._driver = driver
        self._bytes: Array = np.empty(0, np.uint8)

    def room(self, size: int) -> bool:
        """At least `size` bytes; whether the address is another."""
        if self.address and size <= self._bytes.size:
            return False
        capacity = max(size, self._bytes.size * GROWTH // 2, 1)
        self.close()
        self.address, self._bytes = self._driver.pinned(capacity)
        return True

    def fill(self, array: Array) -> None:
        """Put an array's bytes at the start."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._bytes[: data.size] = data

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """A copy of the bytes at the start, as an array."""
        size = int(np.prod(shape)) * dtype.itemsize
        return self._bytes[:size].view(dtype).reshape(shape).copy()

    def close(self) -> None:
        if self.address:
            self._driver.wait()
            self._driver.free_pinned(self.address)
        self.address, self._bytes = 0, np.empty(0, np.uint8)

    def __del__(self) -> None:
        self.close()
