"""Run an ONNX Runtime session on device buffers, one set per combination of input shapes.

With CUDA graphs each set is captured once and replayed. A captured graph reads and writes fixed
addresses (ONNX Runtime, CUDA execution provider, "CUDA Graphs"), so new inputs are copied into the
set. The first batch of a size runs twice: uncaptured, to size the outputs (gpu_graph_id -1), and
again to be captured.
Texts are padded to a few sizes first (`list_profiles`), so that there are few graphs.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...inputs.batch import Array

LIMIT = 128  # sets of buffers; the least recently used one is released
BYTES = 1 << 30  # of all sets together, the one in use included; one larger set is kept alone
ROWS, TOKENS = 64, 16  # largest batch, and smallest number of tokens, of `list_profiles`
UNCAPTURED = -1
GRAPH_ID = "gpu_graph_id"

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Buffers:
    """Device buffers of an ONNX Runtime session for one combination of input shapes.

    binding: IOBinding of inputs and outputs
    values: device arrays of the inputs by name
    graph: gpu_graph_id of the CUDA graph captured on these buffers
    size: bytes of inputs and outputs
    """

    binding: Any
    values: Mapping[str, Any]
    graph: int
    size: int


class BoundSession:
    """ONNX Runtime session that runs on device buffers, kept per combination of input shapes.

    ort: the onnxruntime module
    device: device of the buffers
    outputs: names of the outputs to compute
    graphs: True if the session captures CUDA graphs
    """

    def __init__(
        self, ort: Any, session: Any, device: str, outputs: Sequence[str], *, graphs: bool
    ) -> None:
        self._ort, self._session, self._device, self._graphs = ort, session, device, graphs
        self._outputs = list(outputs)
        self._sets: dict[Shapes, Buffers] = {}
        self._lock = threading.Lock()  # a set holds one caller's inputs at a time
        self._count = 0

    def infer(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """Run ONNX Runtime on the device: copy inputs in, run, and copy outputs out.

        arrays: all inputs, of the session's types.
        """
        with self._lock:
            buffers = self.put(arrays)
            self.run(buffers)
            return self.outputs(buffers)

    def put(self, arrays: Mapping[str, Array]) -> Buffers:
        """Copy a batch's arrays into the session's bound buffers for their shapes, which are
        allocated if new."""
        key: Shapes = tuple((n, arrays[n].shape) for n in sorted(arrays))
        buffers = self._sets.pop(key, None)
        if buffers is None:
            buffers = self._make(arrays)
            self._make_room(buffers.size)
        else:
            for name, array in arrays.items():
                buffers.values[name].update_inplace(np.ascontiguousarray(array))
        self._sets[key] = buffers  # the most recently used is the last
        return buffers

    def run(self, buffers: Buffers) -> None:
        """Run the session once on the contents of the bound buffers, and wait until it is done."""
        self._session.run_with_iobinding(buffers.binding, self._options(buffers.graph))

    def outputs(self, buffers: Buffers) -> dict[str, Array]:
        """Return copies of the outputs of the session's last run."""
        values = buffers.binding.get_outputs()
        return {n: np.array(v.numpy()) for n, v in zip(self._outputs, values, strict=True)}

    def close(self) -> None:
        for buffers in self._sets.values():
            self._release(buffers)
        self._sets.clear()

    def _make(self, arrays: Mapping[str, Array]) -> Buffers:
        """Allocate and bind buffers of an ONNX Runtime session for the shapes of a batch; one run
        determines the sizes of the outputs."""
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
        size = sum(v.tensor_size_in_bytes() for v in (*values.values(), *output_values))
        return Buffers(binding, values, self._count, size)

    def _make_room(self, size: int) -> None:
        """Release the least recently used sets of bound buffers, so that one of `size` bytes
        fits."""
        while self._sets and (
            len(self._sets) >= LIMIT or size + sum(b.size for b in self._sets.values()) > BYTES
        ):
            self._release(self._sets.pop(next(iter(self._sets))))

    def _options(self, graph: int) -> Any:
        options = self._ort.RunOptions()
        if self._graphs:
            options.add_run_config_entry(GRAPH_ID, str(graph))
        return options

    def _release(self, buffers: Buffers) -> None:
        if self._graphs:
            self._session.release_captured_graph(buffers.graph)


def list_profiles(max_length: int) -> list[dict[str, tuple[int, int, int]]]:
    """List the sizes that texts are padded to for CUDA graphs, as profiles for fitted.FittedRunner.

    Sizes are powers of two, so that padding less than doubles the rows, and the tokens of texts of
    at least TOKENS tokens.

    max_length: maximum tokens of the model
    """
    rows = _powers(1, ROWS)
    tokens = [*_powers(min(TOKENS, max_length), max_length - 1), max_length]
    return [{"batch": (b, b, b), "sequence": (s, s, s)} for b in rows for s in tokens]


def _powers(first: int, last: int) -> list[int]:
    """Return `first` and its doubles up to `last`."""
    return [first << i for i in range((last // first).bit_length())] if last >= first else []
