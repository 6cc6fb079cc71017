"""Buffer activations under a memory budget: in memory while they fit, else in files.

One buffer holds one stream of hidden states, a tensor per calibration batch. Files store tensors
exactly, so results do not depend on the budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


class BufferBudget:
    """Bytes of memory that all buffers of calibration activations in a walk share."""

    def __init__(self, bytes_: int) -> None:
        self.left = bytes_

    def take(self, bytes_: int) -> bool:
        """Reserve bytes for the walk's activations; False where fewer are left."""
        if bytes_ > self.left:
            return False
        self.left -= bytes_
        return True


class Buffer(Sequence[Tensor]):
    """List of a walk's activations, float32 tensors on the CPU; tensors beyond the budget go to
    files in `folder`."""

    def __init__(self, budget: BufferBudget, folder: Path) -> None:
        self.budget, self._folder = budget, folder
        self._tensors: list[Tensor | None] = []  # None: in its file
        self._shapes: list[torch.Size] = []

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, i: Any) -> Any:
        tensor = self._tensors[i]
        if tensor is not None:
            return tensor
        size = self._shapes[i].numel()
        mapped = torch.from_file(str(self._file(i)), size=size, dtype=torch.float32)
        return mapped.clone().reshape(self._shapes[i])

    def __setitem__(self, i: int, value: Tensor) -> None:
        if self._tensors[i] is not None:
            self.budget.left += self._size(i)
        self._shapes[i] = value.shape
        self._put(i, value)

    def append(self, value: Tensor) -> None:
        self._tensors.append(None)
        self._shapes.append(value.shape)
        self._put(len(self._tensors) - 1, value)

    def free(self) -> None:
        """Empty the walk's buffer: return its memory to the budget and remove its files."""
        for i, tensor in enumerate(self._tensors):
            if tensor is not None:
                self.budget.left += self._size(i)
            self._file(i).unlink(missing_ok=True)
        self._tensors, self._shapes = [], []

    def _put(self, i: int, value: Tensor) -> None:
        value = value.detach().cpu()
        if self.budget.take(self._size(i)):
            self._tensors[i] = value
            return
        self._tensors[i] = None
        self._folder.mkdir(parents=True, exist_ok=True)
        value.float().contiguous().numpy().tofile(self._file(i))

    def _size(self, i: int) -> int:
        return 4 * self._shapes[i].numel()

    def _file(self, i: int) -> Path:
        return self._folder / f"{i:06d}.f32"
