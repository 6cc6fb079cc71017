"""Device buffers and pinned host buffers that grow on demand."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from ...inputs.batch import Array

GROWTH = 3  # halves: minimum growth by half, so that slowly rising sizes reallocate rarely


class Memory(Protocol):
    """Interface of the GPU's memory by its driver; see cuda.Cuda."""

    def allocate(self, size: int) -> int: ...
    def free(self, address: int) -> None: ...
    def pinned(self, size: int) -> tuple[int, Array]: ...
    def free_pinned(self, address: int) -> None: ...
    def wait(self) -> None: ...


class Device:
    """GPU buffer of an engine that grows on demand and loses its contents when it grows.

    An empty buffer has an address too, because the runtime needs one. The memory is freed when the
    object is garbage collected.
    """

    def __init__(self, driver: Memory) -> None:
        self.address = self.size = 0
        self._driver = driver

    def room(self, size: int) -> bool:
        """Grow the buffer in the GPU's memory to at least `size` bytes; return True if its address
        changed."""
        if self.address and size <= self.size:
            return False
        capacity = max(size, self.size * GROWTH // 2, 1)
        self.close()
        self.size = capacity
        self.address = self._driver.allocate(self.size)
        return True

    def close(self) -> None:
        if self.address:
            self._driver.wait()  # enqueued work may still use it
            self._driver.free(self.address)
        self.address = self.size = 0

    def __del__(self) -> None:
        self.close()


class Pinned:
    """Pinned host buffer, from which the GPU copies, that grows on demand; freed like Device."""

    def __init__(self, driver: Memory) -> None:
        self.address = 0
        self._driver = driver
        self._bytes: Array = np.empty(0, np.uint8)

    def room(self, size: int) -> bool:
        """Grow the pinned buffer to at least `size` bytes; return True if its address changed."""
        if self.address and size <= self._bytes.size:
            return False
        capacity = max(size, self._bytes.size * GROWTH // 2, 1)
        self.close()
        self.address, self._bytes = self._driver.pinned(capacity)
        return True

    def fill(self, array: Array) -> None:
        """Copy an array to the start of the pinned buffer, from which the GPU reads it."""
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._bytes[: data.size] = data

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a copy of the start of the pinned buffer as an array."""
        size = int(np.prod(shape)) * dtype.itemsize
        return self._bytes[:size].view(dtype).reshape(shape).copy()

    def close(self) -> None:
        if self.address:
            self._driver.wait()
            self._driver.free_pinned(self.address)
        self.address, self._bytes = 0, np.empty(0, np.uint8)

    def __del__(self) -> None:
        self.close()
