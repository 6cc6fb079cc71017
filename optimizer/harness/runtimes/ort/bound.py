"""Run a session on buffers that stay where the device keeps them, one set for each combination of
input shapes; with CUDA graphs, each set is captured once and replayed.

A captured graph reads and writes the addresses it was captured with (ONNX Runtime, CUDA execution
provider, "CUDA Graphs"), so a set of buffers never moves: new inputs are copied into it. The run
that sizes the outputs is not captured (gpu_graph_id -1), the next one is, later ones replay it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...inputs.batch import Array

KEPT = 16  # sets of buffers; the one unused for longest goes first
UNCAPTURED = -1
GRAPH_ID = "gpu_graph_id"

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Buffers:
    """One combination of shapes. values: of the inputs. graph: its id."""

    binding: Any
    values: Mapping[str, Any]
    graph: int


class BoundSession:
    """ort: the module. device: where buffers live. graphs: the session captures CUDA graphs."""

    def __init__(self, ort: Any, session: Any, device: str, *, graphs: bool) -> None:
        self._ort, self._session, self._device, self._graphs = ort, session, device, graphs
        self._outputs = [o.name for o in session.get_outputs()]
        self._sets: dict[Shapes, Buffers] = {}
        self._count = 0

    def infer(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Copy in, run, copy out. The arrays are whole and of the session's types."""
        buffers = self.put(arrays)
        self.run(buffers)
        return self.outputs(buffers)

    def put(self, arrays: Mapping[str, Array]) -> Buffers:
        """The arrays in the buffers of their shapes."""
        key: Shapes = tuple((n, arrays[n].shape) for n in sorted(arrays))
        buffers = self._sets.pop(key, None)
        if buffers is None:
            if len(self._sets) >= KEPT:
                self._release(self._sets.pop(next(iter(self._sets))))
            buffers = self._make(arrays)
        else:
            for name, array in arrays.items():
                buffers.values[name].update_inplace(np.ascontiguousarray(array))
        self._sets[key] = buffers  # the most recently used is the last
        return buffers

    def run(self, buffers: Buffers) -> None:
        """Once, on what is in the buffers; it has finished when this returns."""
        self._session.run_with_iobinding(buffers.binding, self._options(buffers.graph))

    def outputs(self, buffers: Buffers) -> dict[str, Array]:
        """Copies of what the last run gave."""
        values = buffers.binding.get_outputs()
        return {n: np.array(v.numpy()) for n, v in zip(self._outputs, values, strict=True)}

    def close(self) -> None:
        for buffers in self._sets.values():
            self._release(buffers)
        self._sets.clear()

    def _make(self, arrays: Mapping[str, Array]) -> Buffers:
        """New buffers, the outputs as large as one run makes them."""
        binding = self._session.io_binding()
        values = {
            name: self._ort.OrtValue.ortvalue_from_numpy(
                np.ascontiguousarray(array), self._device, 0
            )
            for name, array in arrays.items()
        }
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for name in self._outputs:
            binding.bind_output(name, self._device)
        self._session.run_with_iobinding(binding, self._options(UNCAPTURED))
        output_values = binding.get_outputs()
        binding.clear_binding_outputs()
        for name, value in zip(self._outputs, output_values, strict=True):
            binding.bind_ortvalue_output(name, value)
        self._count += 1
        return Buffers(binding, values, self._count)

    def _options(self, graph: int) -> Any:
        options = self._ort.RunOptions()
        if self._graphs:
            options.add_run_config_entry(GRAPH_ID, str(graph))
        return options

    def _release(self, buffers: Buffers) -> None:
        if self._graphs:
            self._session.release_captured_graph(buffers.graph)
