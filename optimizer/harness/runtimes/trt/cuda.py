"""CUDA calls that running an engine needs, through NVIDIA's cuda-python.

A call of cuda-python returns (error, results...); here errors are raised and results returned.
https://nvidia.github.io/cuda-python/cuda-bindings/latest/module/runtime.html
"""

from __future__ import annotations

import ctypes
from importlib import import_module
from typing import Any

import numpy as np

from ...errors import MachineError
from ...inputs.batch import Array

INSTALL = "pip install cuda-python"


class Cuda:
    """One CUDA stream of one GPU, and memory on it, for TensorRT engines.

    runtime: module cuda.bindings.runtime.
    Raises MachineError without a device, and if a call fails.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        if self._call("cudaGetDeviceCount") == 0:
            raise MachineError("no GPU was found", where="device cuda")
        self._stream = self._call("cudaStreamCreate")
        self.stream = int(self._stream)  # for TensorRT

    @property
    def device(self) -> tuple[str, str]:
        """(name, compute capability, e.g. "8.9") of device 0, which is used.

        A MIG instance has the name of its GPU, as in nvidia-smi.
        """
        properties = self._call("cudaGetDeviceProperties", 0)
        raw = (
            properties.name.decode() if isinstance(properties.name, bytes) else str(properties.name)
        )
        name = raw.partition("\0")[0].partition(" MIG ")[0].strip()
        return name, f"{properties.major}.{properties.minor}"

    def allocate(self, size: int) -> int:
        """Allocate `size` bytes on the GPU for an engine, aligned to 256; return the address."""
        return int(self._call("cudaMalloc", size))

    def free(self, address: int) -> None:
        self._call("cudaFree", address)

    def pinned(self, size: int) -> tuple[int, Array]:
        """Allocate pinned host memory, to copy to the GPU; return its address and its bytes as an
        array."""
        address = int(self._call("cudaMallocHost", size))
        memory = (ctypes.c_uint8 * size).from_address(address)
        return address, np.ctypeslib.as_array(memory)

    def free_pinned(self, address: int) -> None:
        self._call("cudaFreeHost", address)

    def to_device(self, device: int, host: int, size: int) -> None:
        """Enqueue a copy of `size` bytes from pinned host memory to the GPU."""
        self._copy(device, host, size, "cudaMemcpyHostToDevice")

    def to_host(self, host: int, device: int, size: int) -> None:
        self._copy(host, device, size, "cudaMemcpyDeviceToHost")

    def on_device(self, target: int, source: int, size: int) -> None:
        self._copy(target, source, size, "cudaMemcpyDeviceToDevice")

    def wait(self) -> None:
        """Wait until the GPU has done all work that was enqueued on the stream."""
        if self.stream:
            self._call("cudaStreamSynchronize", self._stream)

    def begin_capture(self) -> None:
        """Start recording the work enqueued on the stream as a CUDA graph, instead of running
        it."""
        mode = self._runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", self._stream, mode)

    def end_capture(self) -> Any:
        """Stop recording on the stream; return the CUDA graph for `launch`."""
        graph = self._call("cudaStreamEndCapture", self._stream)
        try:
            return self._call("cudaGraphInstantiate", graph, 0)
        finally:
            self._call("cudaGraphDestroy", graph)

    def launch(self, graph: Any) -> None:
        self._call("cudaGraphLaunch", graph, self._stream)

    def free_graph(self, graph: Any) -> None:
        self._call("cudaGraphExecDestroy", graph)

    def close(self) -> None:
        """Close the CUDA stream. Memory can still be freed by its owners."""
        if self.stream:
            self._call("cudaStreamDestroy", self._stream)
        self.stream, self._stream = 0, None

    def _copy(self, target: int, source: int, size: int, kind: str) -> None:
        if size:
            which = getattr(self._runtime.cudaMemcpyKind, kind)
            self._call("cudaMemcpyAsync", target, source, size, which, self._stream)

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *results = getattr(self._runtime, name)(*arguments)
        if error != self._runtime.cudaError_t.cudaSuccess:
            _, message = self._runtime.cudaGetErrorString(error)
            text = message.decode() if isinstance(message, bytes) else str(message)
            raise MachineError(f"{name} failed: {text}", where="device cuda")
        return results[0] if results else None


def open_cuda() -> Cuda:
    """Open a CUDA stream on device 0. Raises MachineError if cuda-python is missing."""
    try:
        runtime = import_module("cuda.bindings.runtime")
    except ImportError as e:
        raise MachineError(
            f"cuda.bindings cannot be imported ({e})", where="device cuda", fix=INSTALL
        ) from None
    return Cuda(runtime)


def first_device() -> tuple[str, str] | None:
    """Return (name, compute capability) of CUDA's device 0; None without CUDA."""
    try:
        driver = open_cuda()
    except MachineError:
        return None
    try:
        return driver.device
    finally:
        driver.close()


def refuse_another(driver: Cuda, expected: tuple[str, str]) -> None:
    """Raises MachineError if CUDA's device 0 is not the GPU that the engine was chosen for.

    nvidia-smi lists GPUs by bus, CUDA by speed, and CUDA_VISIBLE_DEVICES hides some.
    expected: (name, compute capability) of the GPU.
    """
    device = driver.device
    if device != expected:
        raise MachineError(
            f"CUDA's first device is {device[0]} ({device[1]}); the engine was chosen for "
            f"{expected[0]} ({expected[1]}), which nvidia-smi lists first",
            where="device cuda",
            fix="Start with CUDA_DEVICE_ORDER=PCI_BUS_ID and CUDA_VISIBLE_DEVICES=0.",
        )
