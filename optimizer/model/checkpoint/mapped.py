"""Move tensors to files that are mapped into memory.

    tensor -> the same values, whose pages are read from a file when they are used

The kernel drops such pages where memory is short and reads them again, so a model may be larger
than the memory that a process may use. Used for the models that stage validate compares.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor

SMALLEST = 1 << 20  # bytes: a smaller tensor stays in memory


def map_tensor(tensor: Tensor, folder: Path | None = None) -> Tensor:
    """Copy a torch model's tensor into a file mapped into memory and return it from there; a tensor
    of fewer than SMALLEST bytes is returned unchanged.

    folder: folder of the file, on a disk; None: the folder for temporary files

    The file has no name and is removed with the tensor. Raises OSError for a full disk.
    """
    if tensor.nbytes < SMALLEST:
        return tensor
    with tempfile.NamedTemporaryFile(dir=folder, buffering=0) as file:
        left = tensor.contiguous().view(torch.uint8).reshape(-1).numpy().data
        while left:  # one call writes 2 GB at most
            left = left[file.write(left) :]
        mapped = torch.from_file(file.name, size=tensor.numel(), dtype=tensor.dtype)
    return mapped.reshape(tensor.shape)
