"""An open TensorRT engine: its tensors, its contexts, and forwards on one stream.

A context has shapes and addresses, and enqueues a forward. Contexts run one after another, so they
share one buffer for intermediate tensors. Each CUDA graph has its own context, as NVIDIA advises
(docs.nvidia.com, TensorRT: "use one execution context per captured graph").
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ...errors import BundleError, MachineError, UnopenedError
from ...process.collection import pause_collection
from .build.advice import join_errors
from .build.watch import logger
from .caches import write
from .memory import Device, Memory
from .products import PRODUCTS
from .profiles import Profile, Shape
from .validity import refuse_invalid

DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "INT64": "int64",
    "INT32": "int32",
    "INT8": "int8",
    "UINT8": "uint8",
    "BOOL": "bool",
}


Specialize = Literal["lazy", "eager", "none"]
"""Time at which RTX compiles a kernel for one shape: "lazy" in the background (default), "eager"
before the first forward, or "none"."""


class Session:
    """An open TensorRT engine with its execution contexts, on one CUDA stream.

    trt: module of the product
    driver: see cuda.Cuda
    product, graphs, weights, host_code, runtime_cache, specialize: see run.TrtRunner

    Raises BundleError if the file is missing or has a tensor of a type that numpy lacks,
    MachineError if it does not fit this machine (checked before deserialization) or does not open.
    """

    @pause_collection()
    def __init__(
        self,
        trt: Any,
        driver: Any,
        engine: Path,
        product: str,
        *,
        graphs: bool = True,
        weights: Path | None = None,
        host_code: bool = False,
        runtime_cache: Path | None = None,
        specialize: Specialize = "lazy",
    ) -> None:
        self.trt, self.driver, self.file = trt, driver, engine
        self.log = logger(trt)
        self._row = PRODUCTS[product]
        # products with runtime configurations capture graphs themselves
        self._graphs, self.captures = graphs, graphs and not self._row.runtime_config
        self._runtime: Any = trt.Runtime(self.log)  # must outlive the engine
        if host_code:
            self._runtime.engine_host_code_allowed = True
        self.engine: Any = _open(trt, self._runtime, self.log, engine)
        if weights is not None:
            _refit(trt, self.log, self.engine, weights)
        self._read_tensors()
        self._scratch = Device(driver)
        self._cache: Any = None
        self._cache_file = runtime_cache
        self._specialize = specialize
        self._configs: dict[bool, Any] = {}
        self._contexts: dict[tuple[int, bool], Any] = {}

    def _read_tensors(self) -> None:
        """Read from the TensorRT engine `inputs` and `outputs`, {name: dtype}, and `profiles`, each
        {input: range of shapes}."""
        engine, trt = self.engine, self.trt
        self.inputs: dict[str, np.dtype[Any]] = {}
        self.outputs: dict[str, np.dtype[Any]] = {}
        for i in range(engine.num_io_tensors):
            name = engine.get_tensor_name(i)
            kind = engine.get_tensor_dtype(name).name
            if kind not in DTYPES:
                raise BundleError(
                    f"tensor {name} is {kind}, which numpy does not support",
                    where=str(self.file),
                    accepted=", ".join(DTYPES),
                )
            inward = engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT
            (self.inputs if inward else self.outputs)[name] = np.dtype(DTYPES[kind])
        self.profiles: list[Profile] = []
        for p in range(engine.num_optimization_profiles):
            ranges = {n: engine.get_tensor_profile_shape(n, p) for n in self.inputs}
            self.profiles.append(
                {
                    n: (tuple(low), tuple(middle), tuple(high))
                    for n, (low, middle, high) in ranges.items()
                }
            )

    def _config(self, graphs: bool) -> Any:
        """Return TensorRT-RTX's runtime configuration with or without CUDA graphs; each is created
        once."""
        if graphs not in self._configs:
            trt = self.trt
            config = self.engine.create_runtime_config()
            config.set_execution_context_allocation_strategy(
                trt.ExecutionContextAllocationStrategy.USER_MANAGED
            )
            strategies = trt.CudaGraphStrategy
            config.cuda_graph_strategy = (
                strategies.WHOLE_GRAPH_CAPTURE if graphs else strategies.DISABLED
            )
            kinds = trt.DynamicShapesKernelSpecializationStrategy
            config.dynamic_shapes_kernel_specialization_strategy = {
                "lazy": kinds.LAZY,
                "eager": kinds.EAGER,
                "none": kinds.NONE,
            }[self._specialize]
            self._give_cache(config)
            self._configs[graphs] = config
        return self._configs[graphs]

    def _give_cache(self, config: Any) -> None:
        """Attach the cache of compiled kernels, which all runtime configurations share."""
        if self._cache_file is None:
            return
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            if self._cache_file.is_file():  # a cache of another machine is ignored
                self._cache.deserialize(self._cache_file.read_bytes())
        config.set_runtime_cache(self._cache)

    def context(self, profile: int, *, repeats: bool = True) -> Any:
        """Return TensorRT's context that all uncaptured runs of a profile share.

        repeats: True if shapes and addresses repeat, so that the product may capture a graph by
            itself; False for a decoder
        """
        key = (profile, repeats)
        if key not in self._contexts:
            self._contexts[key] = self.new_context(profile, repeats=repeats)
        return self._contexts[key]

    def new_context(self, profile: int, *, repeats: bool = True) -> Any:
        """Create TensorRT's context for a profile, on the shared buffer."""
        engine = self.engine
        if self._row.runtime_config:
            context = engine.create_execution_context(self._config(self._graphs and repeats))
        else:
            strategy = self.trt.ExecutionContextAllocationStrategy.USER_MANAGED
            context = engine.create_execution_context(strategy)
        if context is None:
            raise MachineError(
                f"no execution context was made ({join_errors(self.log.messages)[:300]})",
                where=str(self.file),
            )
        self._scratch.room(engine.device_memory_size_v2)  # size of the largest profile
        context.set_device_memory(self._scratch.address, self._scratch.size)
        if not context.set_optimization_profile_async(profile, self.driver.stream):
            raise MachineError(f"profile {profile} could not be set", where=str(self.file))
        self.driver.wait()
        return context

    def set_shapes(self, context: Any, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
        """Set the input shapes of TensorRT's context; return the output shapes, -1 where they
        depend on the data."""
        for name, shape in shapes.items():
            if not context.set_input_shape(name, shape):
                raise MachineError(
                    f"the engine rejected shape {shape} ({join_errors(self.log.messages)[:300]})",
                    where=f"input {name}",
                )
        return {name: tuple(context.get_tensor_shape(name)) for name in self.outputs}

    def enqueue(self, context: Any, addresses: Mapping[str, int]) -> None:
        """Enqueue one run of the engine on buffers at the given addresses, without waiting for
        it."""
        for name, address in addresses.items():
            context.set_tensor_address(name, address)
        if not context.execute_async_v3(self.driver.stream):
            raise MachineError(
                f"the forward failed ({join_errors(self.log.messages)[:300]})", where=str(self.file)
            )

    def close(self) -> None:
        """Free the engine's contexts and memory, and write the cache of compiled kernels."""
        self._contexts.clear()
        if self._cache is not None and self._cache_file is not None:
            write(self._cache_file, self._cache.serialize())
        self._scratch.close()
        self._configs.clear()
        self._cache = self.engine = self._runtime = None


def _open(trt: Any, runtime: Any, log: Any, file: Path) -> Any:
    """Open a TensorRT engine from its file. Raises BundleError if it is missing, UnopenedError if
    it does not open."""
    if not file.is_file():
        raise BundleError("the engine is missing", where=str(file))
    refuse_invalid(file, trt)
    engine = runtime.deserialize_cuda_engine(file.read_bytes())
    if engine is None:
        raise UnopenedError(
            f"the engine does not open on this machine ({join_errors(log.messages)[:300]})",
            where=str(file),
            fix="It was built for another GPU or version, or is damaged: build it again.",
        )
    return engine


def _refit(trt: Any, log: Any, engine: Any, weights: Path) -> None:
    """Load the weights of the ONNX file into a stripped TensorRT engine."""
    refitter = trt.Refitter(engine, log)
    taken = trt.OnnxParserRefitter(refitter, log).refit_from_file(str(weights))
    if not taken or not refitter.refit_cuda_engine():
        raise UnopenedError(
            f"the engine rejected the weights ({join_errors(log.messages)[:300]})",
            where=str(weights),
        )


def allocator(trt: Any, driver: Memory) -> Any:
    """Return TensorRT's allocator of data-dependent outputs, with .memory and .shapes by name."""

    class Allocator(trt.IOutputAllocator):
        def __init__(self) -> None:
            super().__init__()
            self.memory: dict[str, Device] = {}
            self.shapes: dict[str, Shape] = {}

        def reallocate_output(self, name: str, _memory: int, size: int, _alignment: int) -> int:
            buffer = self.memory.setdefault(name, Device(driver))
            buffer.room(size)
            return buffer.address

        def reallocate_output_async(
            self, name: str, memory: int, size: int, alignment: int, _stream: int
        ) -> int:
            return self.reallocate_output(name, memory, size, alignment)

        def notify_shape(self, name: str, shape: Any) -> None:
            self.shapes[name] = tuple(shape)

        def close(self) -> None:
            for buffer in self.memory.values():
                buffer.close()

    return Allocator()
