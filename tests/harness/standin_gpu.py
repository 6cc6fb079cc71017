"""A GPU made of host memory: enough of cuda.bindings.runtime and of TensorRT's run time to run a
Python function as an engine.

It is handed to the runner in place of the real modules. It is strict where the real ones are
silent or crash: an address outside a live allocation, a shape outside the profile, a forward with
an address missing, are errors. What it offers is what the real ones do: test_trt_api.py compares
the names.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Range = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
OK, WRONG = 0, 1


class Runtime:
    """The functions of cuda.bindings.runtime that are used."""

    cudaError_t = SimpleNamespace(cudaSuccess=OK)
    cudaMemcpyKind = SimpleNamespace(
        cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2, cudaMemcpyDeviceToDevice=3
    )
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)

    def __init__(self, devices: int = 1) -> None:
        self.devices = devices
        self.live: dict[int, Any] = {}
        self.recording: list[Callable[[], None]] | None = None
        self.pending: list[Callable[[], None]] = []  # enqueued and not waited for
        self.calls: list[str] = []
        self.uncapturable = False
        self.name, self.capability = "a card", (8, 9)

    def cudaGetDeviceCount(self) -> tuple[int, int]:
        return OK, self.devices

    def cudaGetDeviceProperties(self, device: int) -> tuple[int, Any]:
        major, minor = self.capability
        return OK, SimpleNamespace(name=self.name.encode(), major=major, minor=minor)

    def cudaStreamCreate(self) -> tuple[int, int]:
        return OK, 7

    def cudaStreamDestroy(self, stream: int) -> tuple[int]:
        return (OK,)

    def cudaMalloc(self, size: int) -> tuple[int, int]:
        return OK, self._hold(size)

    def cudaMallocHost(self, size: int) -> tuple[int, int]:
        return OK, self._hold(size)

    def cudaFree(self, address: int) -> tuple[int]:
        return (OK if self.live.pop(address, None) else WRONG,)

    cudaFreeHost = cudaFree

    def cudaMemcpyAsync(
        self, target: int, source: int, size: int, kind: int, stream: int
    ) -> tuple[int]:
        self.calls.append(f"copy {kind}")
        if not (self.holds(target, size) and self.holds(source, size)):
            return (WRONG,)
        self.enqueue(lambda: self._move(target, source, size))
        return (OK,)

    def cudaStreamSynchronize(self, stream: int) -> tuple[int]:
        self.calls.append("wait")
        done, self.pending = self.pending, []
        for work in done:
            work()
        return (OK,)

    def cudaStreamBeginCapture(self, stream: int, mode: int) -> tuple[int]:
        self.recording = []
        return (OK,)

    def cudaStreamEndCapture(self, stream: int) -> tuple[int, Any]:
        recorded, self.recording = self.recording, None
        return OK, recorded

    def cudaGraphInstantiate(self, graph: Any, flags: int) -> tuple[int, Any]:
        return OK, tuple(graph)

    def cudaGraphDestroy(self, graph: Any) -> tuple[int]:
        return (OK,)

    def cudaGraphLaunch(self, graph: Any, stream: int) -> tuple[int]:
        self.calls.append("graph")
        self.pending += graph
        return (OK,)

    def cudaGraphExecDestroy(self, graph: Any) -> tuple[int]:
        self.calls.append("graph freed")
        return (OK,)

    def cudaGetErrorString(self, error: int) -> tuple[int, bytes]:
        return OK, b"invalid argument"

    def enqueue(self, work: Callable[[], None]) -> None:
        (self.pending if self.recording is None else self.recording).append(work)

    def holds(self, address: int, size: int) -> bool:
        """True if these bytes lie inside one live allocation."""
        return any(a <= address and address + size <= a + len(b) for a, b in self.live.items())

    def array(self, address: int, shape: tuple[int, ...], dtype: Any) -> Array:
        """The bytes there, as an array of their own memory."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        assert self.holds(address, size), "a tensor's address is not memory"
        held = (ctypes.c_uint8 * size).from_address(address)
        return np.frombuffer(held, dtype).reshape(shape)

    def _hold(self, size: int) -> int:
        held = (ctypes.c_uint8 * size)()
        self.live[ctypes.addressof(held)] = held
        return ctypes.addressof(held)

    def _move(self, target: int, source: int, size: int) -> None:
        assert self.holds(target, size), "copied into freed memory"
        assert self.holds(source, size), "copied from freed memory"
        ctypes.memmove(target, source, size)


class Mode(Enum):
    INPUT = 1
    OUTPUT = 2


@dataclass
class Model:
    """Program of an engine. profiles: {input: (min, opt, max)} each; shapes: the outputs' from
    the inputs', -1 where only the data decide; run: arrays to arrays."""

    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    profiles: list[Mapping[str, Range]]
    shapes: Callable[[Mapping[str, tuple[int, ...]]], Mapping[str, tuple[int, ...]]]
    run: Callable[[Mapping[str, Array]], Mapping[str, Array]]


@dataclass
class Engine:
    """ICudaEngine."""

    model: Model
    gpu: Runtime
    contexts: list[Context] = field(default_factory=list)
    device_memory_size_v2: int = 64

    @property
    def num_io_tensors(self) -> int:
        return len(self._types)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.model.profiles)

    @property
    def _types(self) -> dict[str, str]:
        return {**self.model.inputs, **self.model.outputs}

    def get_tensor_name(self, index: int) -> str:
        return list(self._types)[index]

    def get_tensor_dtype(self, name: str) -> Any:
        return SimpleNamespace(name=self._types[name])

    def get_tensor_mode(self, name: str) -> Mode:
        return Mode.INPUT if name in self.model.inputs else Mode.OUTPUT

    def get_tensor_profile_shape(self, name: str, profile: int) -> Range:
        return self.model.profiles[profile][name]

    def create_runtime_config(self) -> Config:
        return Config()

    def create_execution_context(self, how: Any) -> Context:
        self.contexts.append(Context(self, how))
        return self.contexts[-1]


class Config:
    """IRuntimeConfig."""

    cuda_graph_strategy: Any = None
    dynamic_shapes_kernel_specialization_strategy: Any = None

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self._strategy = strategy

    def create_runtime_cache(self) -> Cache:
        return Cache()

    def set_runtime_cache(self, cache: Cache) -> bool:
        return True


class Cache:
    """IRuntimeCache."""

    held = b""

    def deserialize(self, blob: bytes) -> bool:
        self.held = blob
        return True

    def serialize(self) -> bytes:
        return self.held + b"+"


NUMPY = {"FLOAT": "float32", "HALF": "float16", "INT64": "int64"}


class Context:
    """IExecutionContext."""

    def __init__(self, engine: Engine, how: Any = None) -> None:
        self.engine, self.how = engine, how
        self._profile, self._memory = 0, 0
        self._given: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._allocators: dict[str, Any] = {}

    def set_device_memory(self, memory: int, size: int) -> None:
        assert size >= self.engine.device_memory_size_v2
        self._memory = memory

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        self._profile = profile
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        low, _, high = self.engine.model.profiles[self._profile][name]
        self._given[name] = tuple(shape)
        return all(a <= s <= b for a, s, b in zip(low, shape, high, strict=True))

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return self.engine.model.shapes(self._given)[name]

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._addresses[name] = address
        return True

    def set_output_allocator(self, name: str, allocator: Any) -> bool:
        self._allocators[name] = allocator
        return True

    def execute_async_v3(self, stream: int) -> bool:
        gpu, model = self.engine.gpu, self.engine.model
        gpu.calls.append("forward")
        assert gpu.holds(self._memory, self.engine.device_memory_size_v2), "no memory to work in"
        if gpu.uncapturable and gpu.recording is not None:
            return False
        given, addresses = dict(self._given), dict(self._addresses)
        allocators = {n: a for n, a in self._allocators.items() if a is not None}

        def work() -> None:
            arrays = {
                n: gpu.array(addresses[n], given[n], NUMPY[t]) for n, t in model.inputs.items()
            }
            for name, array in model.run(arrays).items():
                address = addresses.get(name, 0)
                if name in allocators:
                    address = allocators[name].reallocate_output(name, 0, array.nbytes, 256)
                    allocators[name].notify_shape(name, array.shape)
                gpu.array(address, array.shape, NUMPY[model.outputs[name]])[...] = array

        gpu.enqueue(work)
        return True


class Base:
    """Base classes that TensorRT offers to derive from."""


def product(model: Model, gpu: Runtime) -> Any:
    """The module: `trt`. The engine it opens is .engine; a file of b"no engine" does not open."""
    engine = Engine(model, gpu)

    class Opener:
        def __init__(self, log: Any) -> None:
            self._log = log

        def deserialize_cuda_engine(self, data: bytes) -> Engine | None:
            made.deserialized += 1
            return None if data == b"no engine" else engine

    severity = SimpleNamespace(WARNING=2)
    made = SimpleNamespace(
        Runtime=Opener,
        ILogger=type("ILogger", (Base,), {"Severity": severity}),
        IOutputAllocator=Base,
        TensorIOMode=Mode,
        ExecutionContextAllocationStrategy=SimpleNamespace(USER_MANAGED=2),
        CudaGraphStrategy=SimpleNamespace(WHOLE_GRAPH_CAPTURE=1, DISABLED=0),
        DynamicShapesKernelSpecializationStrategy=SimpleNamespace(LAZY=0, EAGER=1, NONE=2),
        engine=engine,
        deserialized=0,
    )
    return made


def objecting(trt: Any, bits: int) -> None:
    """Let the product's runtime call every engine invalid, as TensorRT-RTX does of a wrong one."""
    trt.EngineValidity = SimpleNamespace(INVALID=2)
    trt.Runtime.engine_header_size = 64
    trt.Runtime.get_engine_validity = lambda self, header: (2, bits)


def engine_file(folder: Path) -> Path:
    """File to open; its content does not matter here."""
    path = folder / "model.engine"
    path.write_bytes(b"an engine")
    return path
