"""Move tensors to files that are mapped into memory.

    tensor -> the same values, whose pages are read from a file when they are used

The kernel drops such pages where memory is short and reads them again, so a model may be larger
than the memory that a process may use. Weights of a bfloat16 or float16 checkpoint can lie there in
half the bytes (`WidenedTensor`), so that fewer pages are read again. Used for the models
that stage validate compares.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

SMALLEST = 1 << 20  # bytes: a smaller tensor stays in memory


class WidenedTensor(Tensor):
    """Read-only float32 tensor whose values are stored in bfloat16 or float16 and converted at each
    use, for the time of one operation. Rows are looked up (embedding) before they are converted.

    stored: the values, bfloat16 or float16

    An operation that would change it raises TypeError.
    """

    stored: Tensor

    @staticmethod
    def __new__(cls, stored: Tensor) -> WidenedTensor:
        widened = torch.Tensor._make_wrapper_subclass(
            cls, stored.shape, dtype=torch.float32, device=stored.device
        )
        widened.stored = stored
        return widened

    def numpy(self, *, force: bool = False) -> Any:  # noqa: ARG002  # torch's signature
        """Return the tensor's float32 values in new memory."""
        return self.stored.float().numpy()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a static method
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        changed = (args[0], (kwargs or {}).get("out"))
        if func._schema.is_mutable and any(isinstance(x, cls) for x in changed):
            raise TypeError(f"{func} would change a weight that is stored in half precision")
        if func == torch.ops.aten.detach.default:
            return cls(args[0].stored)
        if func == torch.ops.aten.embedding.default and isinstance(args[0], cls):
            return func(args[0].stored, *args[1:], **(kwargs or {})).float()
        widened = tree_map(_widen, (args, kwargs or {}))
        return func(*widened[0], **widened[1])


def _widen(value: Any) -> Any:
    return value.stored.float() if isinstance(value, WidenedTensor) else value


def map_weight(tensor: Tensor, folder: Path | None = None) -> Tensor:
    """Copy a torch model's weight into a mapped file as `map_tensor` does, in half the bytes where
    bfloat16 or float16 holds all its values exactly: then a WidenedTensor of the same values."""
    if tensor.nbytes >= SMALLEST and tensor.dtype == torch.float32:
        for half in (torch.bfloat16, torch.float16):
            stored = tensor.to(half)
            if torch.equal(stored.float(), tensor):
                return WidenedTensor(map_tensor(stored, folder))
    return map_tensor(tensor, folder)


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
