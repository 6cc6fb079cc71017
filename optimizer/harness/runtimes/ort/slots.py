"""Continuous batching in the shared KV cache of ONNX Runtime.

Each text has a row of the shared buffers (decoder.py). Prefill runs row by row, in pieces; a decode
step adds one token to any of the rows in one run. A row's attention_mask is 1 up to its own new
token and 0 after it: the graph takes a row's length from its last 1 (lower/ort/attention.py, case
8). A text of an adapter (adapters.py) runs alone in each step: beside others its float products
round otherwise, and one run of several texts saves little (docs/decisions/0054).

Law (tested, and measured by server/warm_up/generation.py before it is relied on): the logits of a
row are equal in every bit to those of the row alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...contract import Contract
from ...inputs import kv_cache
from ...inputs.batch import Array
from .decoder import FIRST_SCORED, LOGITS, SHARED, BindableModel, check_graph, run_last


def supports_slots(runner: BindableModel) -> bool:
    """Return True where texts can get slots: the model reads and writes its KV cache in one shared
    buffer, and that lies in host memory, which numpy can write."""
    return runner.device == "cpu" and runner.metadata.get(SHARED[0]) == SHARED[1]


class OrtSlots:
    """Slots for texts in the rows of a shared KV cache; see slots.Slots.

    rows: maximum number of texts
    capacity: maximum tokens per text, prompt and answer; memory is used on demand

    A step runs the first rows of the buffers, so texts are moved to fill gaps.
    """

    together = True
    multiple = 1  # rows of a step are padded to a multiple of it by idle rows

    def __init__(self, runner: BindableModel, contract: Contract, rows: int, capacity: int) -> None:
        self._runner, self._spec, self._capacity = runner, contract.decoder, capacity
        self._dtypes = {i.name: i.dtype for i in contract.inputs}
        self._names = kv_cache.list_names(self._spec.layers)
        check_graph(runner, list(self._dtypes), self._names)
        self._chooses = FIRST_SCORED in runner.metadata
        shape = (rows, self._spec.kv_heads, capacity, self._spec.head_dim)
        self._cache: dict[str, Any] = self._allocate(shape)  # by name of the past
        self._texts: list[int | None] = [None] * rows  # by row
        self._lengths: dict[int, int] = {}  # by text
        self._adapters: dict[int, str] = {}  # by text; "" is the model itself
        self._bindings: dict[tuple[str, int, int], Any] = {}  # by adapter, first and last row
        self._views: dict[tuple[int, int], dict[str, Any]] = {}  # their rows of the KV cache

    def open(self, text: int, adapter: str = "") -> None:
        self._texts[self._texts.index(None)] = text
        self._lengths[text], self._adapters[text] = 0, adapter

    def close(self, text: int) -> None:
        self._texts[self._texts.index(text)] = None
        del self._lengths[text], self._adapters[text]

    def read(self, text: int, ids: Sequence[int]) -> Array:
        if not self._chooses or len(ids) == 1:
            return np.asarray(self.scores(text, ids)[-1])
        row, arrays = self._added(text, ids)
        inputs = self._inputs(*arrays)
        view = self._view(row, row + 1)
        logits = run_last(self._model(self._adapters[text]), inputs, view, self._spec)
        self._lengths[text] += len(ids)
        return np.asarray(logits[0])

    def scores(self, text: int, ids: Sequence[int]) -> Array:
        row, arrays = self._added(text, ids)
        logits = self._run(self._adapters[text], row, *arrays)
        self._lengths[text] += len(ids)
        return np.asarray(logits[0])

    def _added(self, text: int, ids: Sequence[int]) -> tuple[int, tuple[Array, Array, Array]]:
        """Return (row of a text, (ids, mask, positions)) for a run of ONNX Runtime that adds `ids`
        to it.

        The arrays have one row; nothing is run yet.
        """
        length = self._lengths[text]
        mask = np.ones((1, length + len(ids)), np.int64)
        positions = np.arange(length, length + len(ids))[None]
        return self._texts.index(text), (np.array([ids], np.int64), mask, positions)

    def step(self, tokens: Mapping[int, int]) -> dict[int, Array]:
        if len(tokens) == 1 and self.multiple == 1:
            ((text, token),) = tokens.items()
            return {text: self.read(text, [token])}
        own = {text: token for text, token in tokens.items() if not self._adapters[text]}
        scores = self._step(own) if own else {}
        return scores | {t: self.read(t, [tokens[t]]) for t in tokens if t not in own}

    def _step(self, tokens: Mapping[int, int]) -> dict[int, Array]:
        """Decode one token of each of these texts in one run of ONNX Runtime. None of them uses an
        adapter."""
        rows = self._texts[: self._gather(tokens)]
        texts = {t: row for row, t in enumerate(rows) if t is not None and t in tokens}
        lengths = np.array([0 if t is None else self._lengths[t] for t in rows])
        idle = [row for row, text in enumerate(rows) if text not in tokens]
        # An idle row writes where its next token will; a full one where it will after `undo`.
        lengths[idle] = np.minimum(lengths[idle], self._capacity - 1)
        ids = np.zeros((len(rows), 1), np.int64)
        ids[list(texts.values()), 0] = [tokens[text] for text in texts]
        mask = (np.arange(lengths.max() + 1)[None] <= lengths[:, None]).astype(np.int64)
        logits = self._run("", 0, ids, mask, lengths[:, None])
        for text in texts:
            self._lengths[text] += 1
        return {text: logits[row, -1] for text, row in texts.items()}

    def undo(self, text: int, tokens: int = 1) -> None:
        self._lengths[text] -= tokens

    def copy_tokens(self, text: int, start: int, stop: int) -> list[Array]:
        row = self._texts.index(text)
        return [buffer[row, :, start:stop].copy() for buffer in self._cache.values()]

    def append(self, text: int, arrays: Sequence[Array]) -> None:
        row, start = self._texts.index(text), self._lengths[text]
        stop = start + arrays[0].shape[1]
        for buffer, array in zip(self._cache.values(), arrays, strict=True):
            buffer[row, :, start:stop] = array
        self._lengths[text] = stop

    def _allocate(self, shape: tuple[int, ...]) -> dict[str, Any]:
        """Allocate an empty KV cache for all slots, {name of its input: zeros of this shape}."""
        return {past: np.zeros(shape, self._runner.inputs[past]) for past, _ in self._names}

    def _gather(self, tokens: Mapping[int, int]) -> int:
        """Swap the texts into the first rows of the KV cache; return the rows of their step."""
        count = len(tokens)
        outside = [i for i, t in enumerate(self._texts) if i >= count and t in tokens]
        inside = [i for i, t in enumerate(self._texts[:count]) if t not in tokens]
        for source, target in zip(outside, inside, strict=True):
            moved, other = self._texts[source], self._texts[target]
            used = max(self._lengths.get(t, 0) for t in (moved, other) if t is not None)
            for buffer in self._cache.values():
                saved = buffer[target, :, :used].copy() if other is not None else None
                buffer[target, :, :used] = buffer[source, :, :used]
                if saved is not None:
                    buffer[source, :, :used] = saved
            self._texts[target], self._texts[source] = moved, other
        return min(-(-count // self.multiple) * self.multiple, len(self._texts))

    def _run(self, adapter: str, row: int, ids: Array, mask: Array, positions: Array) -> Array:
        """Run ONNX Runtime on the texts in rows from `row` of the KV cache on; return logits (rows,
        tokens, vocabulary), float32.

        adapter: adapter of all rows; "" for the model itself
        ids, mask, positions: inputs with one row per row of the step
        """
        rows, sequence = ids.shape
        binding = self._binding(adapter, row, row + rows)
        inputs = self._inputs(ids, mask, positions)
        for name, array in inputs.items():
            binding.bind_cpu_input(name, array)
        logits = np.empty((rows, sequence, self._spec.vocabulary), np.float32)
        binding.bind_output(LOGITS, "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        self._runner.run_bound(binding)
        return logits

    def _model(self, adapter: str) -> BindableModel:
        return self._runner.adapters[adapter] if adapter else self._runner

    def _binding(self, adapter: str, first: int, last: int) -> Any:
        """Return ONNX Runtime's binding of rows first..last of the KV cache, without a copy."""
        if (adapter, first, last) not in self._bindings:
            binding = self._model(adapter).binding()
            view = self._view(first, last)
            for past, present in self._names:
                binding.bind_ortvalue_input(past, view[past])
                binding.bind_ortvalue_output(present, view[past])
            self._bindings[adapter, first, last] = binding
        return self._bindings[adapter, first, last]

    def _view(self, first: int, last: int) -> dict[str, Any]:
        """Return rows first..last of the KV cache without a copy, {name of its input: array}."""
        if (first, last) not in self._views:
            self._views[first, last] = {p: self._part(p, first, last) for p in self._cache}
        return self._views[first, last]

    def _part(self, past: str, first: int, last: int) -> Any:
        return self._runner.value(self._cache[past][first:last])

    def _inputs(self, ids: Array, mask: Array, positions: Array) -> dict[str, Array]:
        arrays = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        return {n: np.ascontiguousarray(arrays[n], dtype) for n, dtype in self._dtypes.items()}
