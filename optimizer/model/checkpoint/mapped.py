"""Move tensors to files that are mapped into memory.

    tensor -> the same values, whose pages are read from a file when they are used

The kernel drops such pages where memory is short and reads them again, so a model may be larger
than the memory that a process may use. Weights of a bfloat16 or float16 checkpoint can lie there in
half the bytes (`WidenedTensor`), so that fewer pages are read again. Used for the models
that stage validate compares.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

SMALLEST = 1 << 20  # bytes: a smaller tensor stays in memory


class Scratch:
    """Memory, one piece per thread, into which weights are converted. It is reused, because the
    kernel takes several times as long to provide new memory as a conversion takes."""

    def __init__(self) -> None:
        self._local = threading.local()

    def widen(self, stored: Tensor) -> Tensor:
        """Convert a weight, or a view of it, to float32. This thread's next call may overwrite the
        result."""
        if not stored.is_contiguous():  # a linear module multiplies by the transpose
            return self.widen(stored.mT).mT if stored.mT.is_contiguous() else stored.float()
        memory = getattr(self._local, "memory", None)
        if memory is None or memory.numel() < stored.numel():
            memory = self._local.memory = torch.empty(stored.numel())
        return memory[: stored.numel()].view(stored.shape).copy_(stored)

    def keep(self, result: Any) -> Any:
        """Return the result of an operation, copied where it lies in this thread's memory."""
        memory = getattr(self._local, "memory", None)
        if memory is None or not isinstance(result, Tensor):
            return result
        own = memory.untyped_storage().data_ptr()
        return result.clone() if result.untyped_storage().data_ptr() == own else result


class WidenedTensor(Tensor):
    """Read-only float32 tensor whose values are stored in bfloat16 or float16 and converted at each
    use, for the time of one operation. Views of it are such tensors too, and rows are looked up
    (embedding) before they are converted.

    stored: the values, bfloat16 or float16
    scratch: memory for the converted values

    An operation that would change it, or a view of it, raises TypeError.
    """

    stored: Tensor
    scratch: Scratch

    @staticmethod
    def __new__(cls, stored: Tensor, scratch: Scratch) -> WidenedTensor:
        widened = torch.Tensor._make_wrapper_subclass(
            cls,
            stored.shape,
            stored.stride(),
            stored.storage_offset(),
            dtype=torch.float32,
            device=stored.device,
        )
        widened.stored, widened.scratch = stored, scratch
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
        first, more = args[0], kwargs or {}
        if func._schema.is_mutable and any(isinstance(x, cls) for x in (first, more.get("out"))):
            raise TypeError(f"{func} would change a weight that is stored in half precision")
        if isinstance(first, cls):
            if _is_view(func):
                views = func(first.stored, *args[1:], **more)
                return tree_map(lambda view: cls(view, first.scratch), views)
            if func == torch.ops.aten.embedding.default:
                return func(first.stored, *args[1:], **more).float()
        used: list[Scratch] = []

        def widen(value: Any) -> Any:
            if not isinstance(value, cls):
                return value
            if used:  # by the operation's first weight
                return value.stored.float()
            used.append(value.scratch)
            return value.scratch.widen(value.stored)

        widened, others = tree_map(widen, (args, more))
        return tree_map(used[0].keep, func(*widened, **others))


def _is_view(func: Any) -> bool:
    """Return True for an operation that selects or reorders values of a half-precision weight,
    False for one that reads its bytes as another type."""
    if func == torch.ops.aten.view.dtype:
        return False
    return any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)


def map_weight(tensor: Tensor, scratch: Scratch, folder: Path | None = None) -> Tensor:
    """Copy a torch model's weight into a mapped file as `map_tensor` does, in half the bytes where
    bfloat16 or float16 holds all its values exactly: then a WidenedTensor of the same values.

    scratch: memory that the weights of a model share
    """
    if tensor.nbytes >= SMALLEST and tensor.dtype == torch.float32:
        for half in (torch.bfloat16, torch.float16):
            if not torch.equal(tensor[0].to(half).float(), tensor[0]):  # most fail here already
                continue
            stored = tensor.to(half)
            if torch.equal(stored.float(), tensor):
                return WidenedTensor(map_tensor(stored, folder), scratch)
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
