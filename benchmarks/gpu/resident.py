"""Inputs that stay on the device, to time the forward of an engine without copies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optimizer.harness.errors import MachineError
from optimizer.harness.inputs.batch import Array
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.harness.runtimes.trt.memory import Device, Pinned
from optimizer.harness.runtimes.trt.profiles import choose
from optimizer.harness.runtimes.trt.run import (
    TrtRunner,
    byte_size,
    capture_graph,
    check_arrays,
    close_all,
)


class OrtResident:
    """Inputs on the device of a `bound` runner of ONNX Runtime, for repeated forwards."""

    def __init__(self, runner: OrtRunner, arrays: Mapping[str, Array]) -> None:
        assert runner.bound is not None
        self._session, self._buffers = runner.bound, runner.bound.put(arrays)

    def run(self) -> None:
        """Run one forward without copies, and wait for its end."""
        self._session.run(self._buffers)

    def outputs(self) -> dict[str, Array]:
        """Return the outputs of the last run."""
        return self._session.outputs(self._buffers)


class TrtResident:
    """Inputs on the device, for repeated forwards.

    Raises MachineError for an engine whose output shapes depend on the data.
    """

    def __init__(self, runner: TrtRunner, arrays: Mapping[str, Array]) -> None:
        session, model = runner.session, runner.model.name
        self._session, self._driver = session, session.driver
        shapes = check_arrays(session, arrays, model)
        self._context = session.new_context(choose(session.profiles, shapes))
        self._output_shapes = session.set_shapes(self._context, shapes)
        if any(size < 0 for shape in self._output_shapes.values() for size in shape):
            raise MachineError("output shapes depend on the data", where=model)
        sizes = {n: a.nbytes for n, a in arrays.items()}
        sizes |= {n: byte_size(s, session.outputs[n]) for n, s in self._output_shapes.items()}
        self._device = {n: Device(self._driver) for n in sizes}
        self._pinned = {n: Pinned(self._driver) for n in sizes}
        for name, size in sizes.items():
            self._device[name].room(size)
            self._pinned[name].room(size)
        for name, array in arrays.items():
            self._pinned[name].fill(array)
            self._driver.to_device(
                self._device[name].address, self._pinned[name].address, array.nbytes
            )
        self._forward()
        self._driver.wait()
        self.graph: Any = None
        self.not_captured = ""
        if session.captures:
            self.graph, self.not_captured = capture_graph(self._driver, self._forward)

    def _forward(self) -> None:
        self._session.enqueue(self._context, {n: d.address for n, d in self._device.items()})

    def run(self) -> None:
        """Run one forward without copies, and wait for its end."""
        if self.graph is not None:
            self._driver.launch(self.graph)
        else:
            self._forward()
        self._driver.wait()

    def outputs(self) -> dict[str, Array]:
        """Copy the outputs of the last forward to the host."""
        types = self._session.outputs
        for name, shape in self._output_shapes.items():
            size = byte_size(shape, types[name])
            self._driver.to_host(self._pinned[name].address, self._device[name].address, size)
        self._driver.wait()
        return {n: self._pinned[n].array(s, types[n]) for n, s in self._output_shapes.items()}

    def close(self) -> None:
        if self.graph is not None:
            self._driver.free_graph(self.graph)
        close_all(self._device, self._pinned)
