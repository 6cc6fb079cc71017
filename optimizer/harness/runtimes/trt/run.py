"""Run a TensorRT engine of any product on a GPU, through NVIDIA's cuda-python.

Arrays pass through pinned buffers, copies and the forward are enqueued on one stream, and repeated
shapes are replayed as a CUDA graph that includes the copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...contract import Contract
from ...errors import InputError, MachineError
from ...inputs import kv_cache
from ...inputs.batch import Array
from ...process.closing import Closing
from ..ort.run import check_names
from ..slots import SeparateDecoders, Slots
from .cuda import open_cuda, refuse_another
from .decoder import TrtDecoder
from .graphs import Graphs
from .memory import Device, Pinned
from .products import PRODUCTS, import_product
from .profiles import Shape, choose
from .session import Session, Specialize, allocator

Captured = tuple[Any, Any, dict[str, Shape]]  # graph, its context, output shapes


class TrtRunner(Closing):
    """A TensorRT engine opened for inference; see runner.Runner.

    engine: file that fits this machine according to bundle/fit.py.
    product: a key of products.PRODUCTS.
    graphs: replay CUDA graphs.
    weights: ONNX model with the weights of a stripped engine.
    host_code: let a version-compatible engine run its own runtime; its digest must be verified.
    runtime_cache: file of RTX's compiled kernels, read if present and written at close.
    specialize: time at which RTX compiles kernels for one shape (session.Specialize).
    gpu: (name, compute capability) that the engine was chosen for.
    trt, driver: module and driver; opened here if None.
    Raises BundleError if the file is missing, MachineError if the package, cuda-python or the GPU
    is missing or the GPU is not `gpu`, UnopenedError if the engine does not open.
    """

    device = "cuda"
    threads = 0

    def __init__(
        self,
        engine: Path,
        *,
        product: str = "tensorrt-rtx",
        graphs: bool = True,
        weights: Path | None = None,
        host_code: bool = False,
        runtime_cache: Path | None = None,
        specialize: Specialize = "lazy",
        gpu: tuple[str, str] | None = None,
        trt: Any = None,
        driver: Any = None,
    ) -> None:
        self.model = Path(engine)
        trt = trt if trt is not None else import_product(product)
        self._driver = driver if driver is not None else open_cuda()
        if gpu is not None:
            refuse_another(self._driver, gpu)
        self.specialize = specialize if PRODUCTS[product].runtime_config else None
        self.session = Session(
            trt,
            self._driver,
            self.model,
            product,
            graphs=graphs,
            weights=weights,
            host_code=host_code,
            runtime_cache=runtime_cache,
            specialize=specialize,
        )
        names = (*self.session.inputs, *self.session.outputs)
        self._device = {n: Device(self._driver) for n in names}
        self._pinned = {n: Pinned(self._driver) for n in names}
        self._graphs: Graphs[Captured] = Graphs(lambda graph: self._driver.free_graph(graph[0]))
        self.not_captured: dict[str, str] = {}  # shapes -> reason why they run without a graph

    @property
    def inputs(self) -> dict[str, np.dtype[Any] | None]:
        return dict(self.session.inputs)

    @property
    def outputs(self) -> list[str]:
        return list(self.session.outputs)

    @property
    def metadata(self) -> dict[str, str]:
        """Always {}: engines have no metadata."""
        return {}

    def infer(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Run the TensorRT engine once on a batch. Raises InputError naming the missing, unknown or
        misshaped input, or the input outside all profiles and its range."""
        shapes = check_arrays(self.session, arrays, self.model.name)
        profile = choose(self.session.profiles, shapes)
        for name, array in arrays.items():
            self._room(name, array.nbytes)
            self._pinned[name].fill(array)
        key = (profile, tuple(sorted(shapes.items())))
        captured = self._graphs.get(key)
        if captured is not None:
            graph, _, output_shapes = captured
            self._driver.launch(graph)
        else:
            output_shapes = self._run_new(key, profile, shapes)
        self._driver.wait()
        return {
            n: self._pinned[n].array(output_shapes[n], t) for n, t in self.session.outputs.items()
        }

    def _run_new(self, key: Any, profile: int, shapes: dict[str, Shape]) -> dict[str, Shape]:
        """Enqueue a run of the engine without a CUDA graph, or capture one if the key is due.

        Returns the output shapes.
        """
        context = self.session.context(profile)
        output_shapes = self.session.set_shapes(context, shapes)
        if any(size < 0 for shape in output_shapes.values() for size in shape):
            return self._dependent(context, shapes, output_shapes)
        for name, shape in output_shapes.items():
            self._room(name, byte_size(shape, self.session.outputs[name]))
        if self.session.captures and self._graphs.due(key):
            captured = self._capture(profile, shapes)
            if captured is not None:
                self._graphs.put(key, captured)
                self._driver.launch(captured[0])
                return output_shapes
            self._graphs.refuse(key)
        self._enqueue(context, shapes, output_shapes)
        return output_shapes

    def _enqueue(
        self, context: Any, shapes: Mapping[str, Shape], output_shapes: Mapping[str, Shape]
    ) -> None:
        """Enqueue copies of inputs to the GPU, the engine's run, and copies of outputs to the
        host."""
        for name, shape in shapes.items():
            size = byte_size(shape, self.session.inputs[name])
            self._driver.to_device(self._device[name].address, self._pinned[name].address, size)
        self.session.enqueue(context, {n: d.address for n, d in self._device.items()})
        for name, shape in output_shapes.items():
            size = byte_size(shape, self.session.outputs[name])
            self._driver.to_host(self._pinned[name].address, self._device[name].address, size)

    def _capture(self, profile: int, shapes: Mapping[str, Shape]) -> Captured | None:
        """Capture a CUDA graph of `_enqueue` with its own context.

        Returns None if that fails, with the reason in `not_captured`.
        """
        context = self.session.new_context(profile)
        output_shapes = self.session.set_shapes(context, shapes)
        self._enqueue(context, shapes, output_shapes)  # one-time work must not be in the graph
        self._driver.wait()
        graph, why = capture_graph(
            self._driver, lambda: self._enqueue(context, shapes, output_shapes)
        )
        if graph is None:
            self.not_captured[str(dict(shapes))] = why
            return None
        return graph, context, output_shapes

    def _dependent(
        self, context: Any, shapes: Mapping[str, Shape], output_shapes: Mapping[str, Shape]
    ) -> dict[str, Shape]:
        """Run the engine where its output shapes depend on the data; return the output shapes.

        output_shapes: shapes as far as known, -1 where they depend on the data
        """
        unknown = [n for n, shape in output_shapes.items() if any(size < 0 for size in shape)]
        room = allocator(self.session.trt, self._driver)
        for name in unknown:
            context.set_output_allocator(name, room)
        known = {n: shape for n, shape in output_shapes.items() if n not in unknown}
        for name, shape in known.items():
            self._room(name, byte_size(shape, self.session.outputs[name]))
        for name, shape in shapes.items():
            size = byte_size(shape, self.session.inputs[name])
            self._driver.to_device(self._device[name].address, self._pinned[name].address, size)
        self.session.enqueue(
            context, {n: d.address for n, d in self._device.items() if n not in unknown}
        )
        self._driver.wait()
        final_shapes = {**known, **{n: room.shapes[n] for n in unknown}}
        for name, shape in final_shapes.items():
            size = byte_size(shape, self.session.outputs[name])
            self._pinned[name].room(size)
            buffer = room.memory[name] if name in unknown else self._device[name]
            self._driver.to_host(self._pinned[name].address, buffer.address, size)
        self._driver.wait()
        for name in unknown:
            context.set_output_allocator(name, None)
        room.close()
        return final_shapes

    def _room(self, name: str, size: int) -> None:
        """Grow the buffers of an engine's input or output; where an address changes, the captured
        CUDA graphs become invalid."""
        moved = self._device[name].room(size)
        moved = self._pinned[name].room(size) or moved
        if moved:
            self._graphs.clear()

    def decoder(self, contract: Contract, capacity: int = 0) -> TrtDecoder:
        return TrtDecoder(self.session, contract, capacity)

    def slots(self, contract: Contract, rows: int, capacity: int) -> Slots:  # noqa: ARG002
        return SeparateDecoders(self, contract, capacity)

    def cache_bytes(self, contract: Contract, tokens: int) -> int:
        return kv_cache.text_bytes(contract.decoder, tokens, kv_cache.read_itemsize(self.inputs))

    def close(self) -> None:
        """Free the engine's device memory and write the runtime cache."""
        self._graphs.clear()
        close_all(self._device, self._pinned)
        self.session.close()
        self._driver.close()


def close_all(device: Mapping[str, Device], pinned: Mapping[str, Pinned]) -> None:
    """Free all buffers of an engine, on the GPU and on the host."""
    for buffer in device.values():
        buffer.close()
    for beside in pinned.values():
        beside.close()


def capture_graph(driver: Any, enqueue: Any) -> tuple[Any, str]:
    """Record the work that `enqueue` enqueues as a CUDA graph; return (graph, ""), or (None,
    reason) on failure."""
    driver.begin_capture()
    try:
        enqueue()
    except MachineError as e:
        why = str(e)
    else:
        why = ""
    try:
        graph = driver.end_capture()  # also after an error
    except MachineError as e:
        return None, why or str(e)
    if why:
        driver.free_graph(graph)
        return None, why
    return graph, ""


def check_arrays(session: Session, arrays: Mapping[str, Array], model: str) -> dict[str, Shape]:
    """Check the input arrays of a TensorRT engine; return {input: shape}. Raises InputError for a
    wrong name or dtype.

    model: name of the engine, for the error
    """
    check_names(set(arrays), set(session.inputs), model)
    for name, dtype in session.inputs.items():
        if arrays[name].dtype != dtype:
            raise InputError(
                f"{arrays[name].dtype} was given", where=f"input {name}", accepted=str(dtype)
            )
    return {name: tuple(map(int, arrays[name].shape)) for name in session.inputs}


def byte_size(shape: Shape, dtype: np.dtype[Any]) -> int:
    return int(np.prod(shape)) * dtype.itemsize
