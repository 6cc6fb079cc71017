"""Decode steps of one size for each batch and capacity of the KV cache, replayed as a CUDA graph.

A captured graph has fixed shapes and addresses (bound.py). So a step of one token per row reads
ids, positions and a mask of the cache's whole capacity from buffers that stay on the device. The
mask's columns after the newest token are 0, and the graph takes a row's length from its last 1
(lower/ort/attention.py, case 8). Longer inputs, such as prompts, run as in decoder.py, uncaptured.

Buffers and graph are kept for later texts, because capturing takes many steps' time. A step that is
captured runs twice, and writes the same keys and values into the same columns.

Law (tested on a CPU, without a graph): logits and cache are equal in every bit to OrtDecoder's.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from ...contract import Contract
from ...inputs import kv_cache
from ...inputs.batch import Array
from ..decoder import check_step
from .bound import BYTES
from .decoder import LOGITS, SHARED, BindableModel, OrtDecoder

SMALLEST = 256  # tokens of the least capacity; each next one is twice as large
MASK = "attention_mask"


class ReplayingModel(BindableModel, Protocol):
    """Interface of an ONNX Runtime model whose runs may be captured as CUDA graphs; see
    OrtRunner.run_bound."""

    def run_bound(self, binding: Any, graph: int = ...) -> None: ...


class FixedStep:
    """Decode step, in ONNX Runtime, of one token per row, on buffers of fixed size that a CUDA
    graph can replay.

    cache: {name of the past: OrtValue of (rows, kv_heads, capacity, head_dim)}
    graph: gpu_graph_id
    rows, capacity: rows, and maximum tokens per row, of the KV cache
    """

    def __init__(
        self, runner: ReplayingModel, contract: Contract, cache: Mapping[str, Any], graph: int
    ) -> None:
        self.cache, self.graph = dict(cache), graph
        self._dtypes = {i.name: i.dtype for i in contract.inputs}
        self._runner, spec = runner, contract.decoder
        names = kv_cache.list_names(spec.layers)
        rows, _, capacity, _ = self.cache[names[0][0]].shape()
        self.rows, self.capacity = rows, capacity
        self._inputs = {
            name: runner.value(np.zeros((rows, capacity if name == MASK else 1), dtype))
            for name, dtype in self._dtypes.items()
        }
        self._logits = runner.value(np.zeros((rows, 1, spec.vocabulary), np.float32))
        self._binding = runner.binding()
        for name, value in (self._inputs | self.cache).items():
            self._binding.bind_ortvalue_input(name, value)
        self._binding.bind_ortvalue_output(LOGITS, self._logits)
        for past, present in names:
            self._binding.bind_ortvalue_output(present, self.cache[past])

    @property
    def size(self) -> int:
        """Return the bytes of the KV cache of this step's buffers."""
        return sum(int(v.tensor_size_in_bytes()) for v in self.cache.values())

    def run(self, arrays: Mapping[str, Array]) -> Array:
        """Decode one token of each row in the captured step; return its logits (rows, 1,
        vocabulary).

        arrays: inputs without the KV cache; attention_mask ends with the new token
        """
        for name, value in self._inputs.items():
            array = arrays[name]
            if name == MASK:
                array = np.pad(array, ((0, 0), (0, self.capacity - array.shape[1])))
            value.update_inplace(np.ascontiguousarray(array, self._dtypes[name]))
        self._runner.run_bound(self._binding, self.graph)
        logits = self._logits.numpy()  # the buffer itself on the CPU, a copy on a GPU
        return np.array(logits, copy=self._runner.device == "cpu")


def capacity_of(tokens: int, context: int) -> int:
    """Return, for captured steps, the capacity of a KV cache for `tokens` per row: the next power
    of two.

    context: maximum tokens that the model reads, which also limits the capacity
    """
    capacity = SMALLEST
    while capacity < tokens:
        capacity *= 2
    return max(tokens, min(capacity, context))


class FixedSteps:
    """Pool of one model's fixed steps: makes them, and keeps idle ones for later texts.

    release: function that frees a captured graph by its gpu_graph_id
    """

    def __init__(self, runner: ReplayingModel, release: Callable[[int], None]) -> None:
        self._runner, self._release = runner, release
        self._free: list[FixedStep] = []  # the most recently used is the last
        self._lock = threading.RLock()  # give_back may run while this thread collects garbage
        self._count = 0

    def take(self, contract: Contract, rows: int, tokens: int) -> FixedStep:
        """Return an idle or new captured step for at least `tokens` tokens per row.

        Its KV cache may hold the values of an earlier text.
        """
        capacity = capacity_of(tokens, contract.decoder.context)
        with self._lock:
            for step in self._free:
                if (step.rows, step.capacity) == (rows, capacity):
                    self._free.remove(step)
                    return step
        spec = contract.decoder
        shape = (rows, spec.kv_heads, capacity, spec.head_dim)
        names = [past for past, _ in kv_cache.list_names(spec.layers)]
        runner = self._runner
        return self.make(
            contract, {past: runner.value(np.zeros(shape, runner.inputs[past])) for past in names}
        )

    def make(self, contract: Contract, cache: Mapping[str, Any]) -> FixedStep:
        """Return a new captured step on a KV cache that the caller owns.

        cache: {name of the past: OrtValue}
        """
        with self._lock:
            self._count += 1
            return FixedStep(self._runner, contract, cache, self._count)

    def give_back(self, step: FixedStep) -> None:
        """Give a captured step that came from `take` back to the pool, for later texts.

        The pool keeps at most BYTES of KV cache; graphs of least recently used steps are released.
        """
        with self._lock:
            self._free.append(step)
            while sum(s.size for s in self._free) > BYTES:
                self._release(self._free.pop(0).graph)

    def release(self, steps: Mapping[Any, FixedStep]) -> None:
        """Release the CUDA graphs of steps that `make` returned."""
        with self._lock:
            for step in steps.values():
                self._release(step.graph)

    def close(self) -> None:
        """Release the CUDA graphs of all steps that are not in use."""
        with self._lock:
            for step in self._free:
                self._release(step.graph)
            self._free.clear()


class ReplayingDecoder(OrtDecoder):
    """Decoder whose steps of one token per row run as a FixedStep; longer inputs run uncaptured."""

    def __init__(
        self, runner: ReplayingModel, contract: Contract, capacity: int, steps: FixedSteps
    ) -> None:
        super().__init__(runner, contract, capacity)
        self._contract, self._steps = contract, steps
        self._fixed: FixedStep | None = None
        self._give_back: Callable[[], object] = lambda: None

    def step(self, arrays: Mapping[str, Array]) -> Array:
        if arrays["input_ids"].shape[1:] != (1,):
            return super().step(arrays)
        self._rows, _ = check_step(arrays, self._inputs, self.past, self._rows)
        self._bind_cache(self.past + 1)
        assert self._fixed is not None
        logits = self._fixed.run(arrays)
        self.past += 1
        return logits

    def _make_room(self, total: int) -> bool:
        """Move the KV cache to a fixed step with room for `total` tokens per row.

        Returns True if the buffers are new.
        """
        if self._fixed is not None and total <= self._fixed.capacity:
            return False
        larger = self._steps.take(self._contract, self._rows, max(total, self._capacity))
        for name, value in larger.cache.items():
            # 0 in every other column: a kernel may multiply those under the mask by 0, and an
            # earlier text's NaN would stay NaN
            array = np.zeros(value.shape(), self._runner.inputs[name])
            if name in self._cache:
                array[:, :, : self.past] = self._cache[name].numpy()[:, :, : self.past]
            value.update_inplace(array)
        self._give_back()
        self._fixed, self._cache = larger, larger.cache
        self._give_back = finalize = weakref.finalize(self, self._steps.give_back, larger)
        finalize.atexit = False
        return True


def can_replay(runner: BindableModel) -> bool:
    """Return True if the model's past and present share one buffer, as fixed steps require."""
    return runner.metadata.get(SHARED[0]) == SHARED[1]
