"""Continuous batching in a shared KV cache that stays on the device.

Texts keep their rows. A step of several texts runs all rows, idle ones too, and a step of one text
runs its row alone. Both are a FixedStep (fixed_step.py), which a GPU replays as one CUDA graph:
a decode step reads all weights whatever the number of rows, so idle rows take little time. Prompts,
and texts of adapters, run uncaptured on the text's row.

Law (tested on a CPU, without a graph): the logits of a text are equal in every bit to OrtSlots'.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...contract import Contract
from ...inputs.batch import Array
from .fixed_step import FixedStep, FixedSteps, ReplayingModel
from .slots import OrtSlots


class DeviceSlots(OrtSlots):
    """Slots for texts whose KV cache stays on the runner's device; see slots.Slots.

    rows: maximum number of texts
    capacity: maximum tokens per text, prompt and answer; memory is allocated at once
    steps: makes the captured steps, and releases their graphs once these slots are deleted
    """

    def __init__(
        self,
        runner: ReplayingModel,
        contract: Contract,
        rows: int,
        capacity: int,
        steps: FixedSteps,
    ) -> None:
        super().__init__(runner, contract, rows, capacity)
        self._contract, self._steps = contract, steps
        self._fixed: dict[tuple[int, int], FixedStep] = {}  # by first and last row
        weakref.finalize(self, steps.release, self._fixed).atexit = False
        self._written = [0] * rows  # columns of each row that are not 0

    def close(self, text: int) -> None:
        """Free a text's slot on the device and set its row of the KV cache to 0.

        A kernel may multiply masked values by 0, and a NaN left there would reach the next text.
        """
        row = self._texts.index(text)
        stop = min(1 + max(self._written[row], self._lengths[text]), self._capacity)
        zeros = np.zeros((self._spec.kv_heads, stop, self._spec.head_dim))
        self._write(row, 0, [zeros] * len(self._cache))
        self._written[row] = 0
        super().close(text)

    def undo(self, text: int, tokens: int = 1) -> None:
        row = self._texts.index(text)
        self._written[row] = max(self._written[row], self._lengths[text])
        super().undo(text, tokens)

    def copy_tokens(self, text: int, start: int, stop: int) -> list[Array]:
        row = self._texts.index(text)
        return [
            np.stack([part.numpy() for part in self._heads(past, row, start, stop)])
            for past in self._cache
        ]

    def append(self, text: int, arrays: Sequence[Array]) -> None:
        self._write(self._texts.index(text), self._lengths[text], arrays)
        self._lengths[text] += arrays[0].shape[1]

    def _allocate(self, shape: tuple[int, ...]) -> dict[str, Any]:
        return {p: self._runner.value(a) for p, a in super()._allocate(shape).items()}

    def _gather(self, tokens: Mapping[int, int]) -> int:  # noqa: ARG002
        return len(self._texts)

    def _run(self, adapter: str, row: int, ids: Array, mask: Array, positions: Array) -> Array:
        """Run in ONNX Runtime the texts in the rows from `row` on: a captured step for one token
        per row, else uncaptured."""
        rows, sequence = ids.shape
        if adapter or sequence > 1:
            return super()._run(adapter, row, ids, mask, positions)
        if (row, row + rows) not in self._fixed:
            view = self._view(row, row + rows)
            self._fixed[row, row + rows] = self._steps.make(self._contract, view)
        return self._fixed[row, row + rows].run(self._inputs(ids, mask, positions))

    def _part(self, past: str, first: int, last: int) -> Any:
        shape = self._cache[past].shape()
        return slice_value(
            self._cache[past], first * int(np.prod(shape[1:])), [last - first, *shape[1:]]
        )

    def _heads(self, past: str, row: int, start: int, stop: int) -> list[Any]:
        """Return tokens start..stop of a row of the KV cache, as one OrtValue (tokens, head_dim)
        per head.

        The OrtValues share the memory of the KV cache.
        """
        value = self._cache[past]
        _, heads, capacity, width = value.shape()
        return [
            slice_value(
                value, ((row * heads + head) * capacity + start) * width, [stop - start, width]
            )
            for head in range(heads)
        ]

    def _write(self, row: int, start: int, arrays: Sequence[Array]) -> None:
        """Write keys and values, (kv_heads, tokens, head_dim) each, into a row of the device's KV
        cache from `start` on."""
        for past, array in zip(self._cache, arrays, strict=True):
            array = np.ascontiguousarray(array, self._runner.inputs[past])
            for part, head in zip(
                self._heads(past, row, start, start + array.shape[1]), array, strict=True
            ):
                part.update_inplace(head)


class _Tensor(ctypes.Structure):
    """Tensor in the DLPack ABI (DLTensor), as ONNX Runtime exports it,
    https://dmlc.github.io/dlpack/latest/c_api.html."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
    )


def slice_value(value: Any, start: int, shape: Sequence[int]) -> Any:
    """Return consecutive elements of an OrtValue as an OrtValue that shares and keeps its memory.

    start: index of the first element
    shape: shape of the result

    ONNX Runtime lacks such a function, so the tensor is exported and imported by DLPack, with
    address and shape changed in between.
    """
    capsule = value.__dlpack__()
    address = _pointer(capsule, b"dltensor")
    tensor = ctypes.cast(address, ctypes.POINTER(_Tensor)).contents
    sizes = (ctypes.c_int64 * len(shape))(*shape)  # read by from_dlpack, and not after it
    tensor.data += start * tensor.bits // 8
    tensor.ndim, tensor.shape = len(shape), sizes
    return type(value).from_dlpack(capsule)


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
