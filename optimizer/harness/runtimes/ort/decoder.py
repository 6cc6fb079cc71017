"""Continue sequences with ONNX Runtime, the key/value cache staying where the device keeps it.

What a step returns as present.{i}.key and .value is bound as past_key_values.{i} of the next,
without passing through numpy. Two ways, and the model says which it takes:
 - every present is a new array, one step longer than its past (any graph);
 - with "kv_cache": "shared" in the model's metadata, past and present are one buffer made for
   the whole text, and the graph writes the new rows in place (GroupQueryAttention). The length
   then comes from attention_mask. What it saves: docs/decisions/0004.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from ...contract import Contract, Generation
from ...errors import BundleError
from ...inputs import kv_cache
from ...inputs.batch import Array
from ..decoder import check_step

LOGITS = "logits"
SHARED = ("kv_cache", "shared")  # key and value in the model's metadata


class Named(Protocol):
    """A model whose inputs and outputs have names."""

    @property
    def inputs(self) -> Mapping[str, Any]: ...
    @property
    def outputs(self) -> list[str]: ...


class Opened(Named, Protocol):
    """What is needed of an open model: see OrtRunner."""

    device: str

    @property
    def metadata(self) -> dict[str, str]: ...
    def binding(self) -> Any: ...
    def value(self, array: Array) -> Any: ...
    def run_bound(self, binding: Any) -> None: ...


class OrtDecoder:
    """A batch of sequences; see decoder.Decoder.

    capacity: tokens the shared buffers are made for; they grow when it is passed.
    Raises BundleError when the graph has not the inputs and outputs of the contract.
    """

    def __init__(self, runner: Opened, contract: Contract, capacity: int = 0) -> None:
        self._runner, self._spec = runner, contract.decoder
        self._capacity = capacity
        self._names = kv_cache.names(self._spec.layers)
        self._inputs = [i.name for i in contract.inputs]
        check_graph(runner, self._inputs, self._names)
        self._shared = runner.metadata.get(SHARED[0]) == SHARED[1]
        self._cache: dict[str, Any] = {}  # name of the past -> the runtime's array
        self._binding = runner.binding()
        self._rows = 0
        self.past = 0

    def step(self, arrays: Mapping[str, Array]) -> Array:
        """logits (batch, sequence, vocabulary), float32. Raises InputError for arrays that are
        not the contract's, or whose shapes do not continue what is remembered."""
        rows, sequence = check_step(arrays, self._inputs, self.past, self._rows)
        self._rows = rows
        total = self.past + sequence
        kept = {n: np.ascontiguousarray(a) for n, a in arrays.items()}  # alive while it runs
        for name, array in kept.items():
            self._binding.bind_cpu_input(name, array)
        logits = np.empty((rows, sequence, self._spec.vocabulary), np.float32)
        self._binding.bind_output(LOGITS, "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        self._bind_cache(total)
        self._runner.run_bound(self._binding)
        if not self._shared:  # shared buffers are bound already, and own their memory
            _, *present = self._binding.get_outputs()  # in the order they were bound
            for (past, _), value in zip(self._names, present, strict=True):
                self._cache[past] = value
        self.past = total
        return logits

    def cache(self) -> dict[str, Array]:
        """Copies of what is remembered: present.{i}.key and .value, (batch, kv_heads, past,
        head_dim) each."""
        return {
            present: np.array(self._cache[past].numpy()[:, :, : self.past])
            for past, present in self._names
            if past in self._cache
        }

    def _bind_cache(self, total: int) -> None:
        if self._shared:
            if self._make_room(total):
                for past, present in self._names:
                    self._binding.bind_ortvalue_input(past, self._cache[past])
                    self._binding.bind_ortvalue_output(present, self._cache[past])
            return
        if not self._cache:
            self._cache = {past: self._buffer(past, 0) for past, _ in self._names}
        for past, present in self._names:
            self._binding.bind_ortvalue_input(past, self._cache[past])
            self._binding.bind_output(present, self._runner.device)

    def _make_room(self, total: int) -> bool:
        """Shared buffers of at least `total` tokens, what is remembered copied into new ones.
        Whether they are new."""
        capacity = self._cache[self._names[0][0]].shape()[2] if self._cache else 0
        if total <= capacity:
            return False
        size = max(total, self._capacity, 2 * capacity)
        old = self._cache
        self._cache = {p: self._buffer(p, size, old.get(p)) for p, _ in self._names}
        return True

    def _buffer(self, name: str, size: int, old: Any = None) -> Any:
        spec: Generation = self._spec
        shape = (self._rows, spec.kv_heads, size, spec.head_dim)
        array = np.zeros(shape, self._runner.inputs[name])
        if old is not None:
            array[:, :, : self.past] = old.numpy()[:, :, : self.past]
        return self._runner.value(array)


def check_graph(runner: Named, inputs: list[str], names: list[tuple[str, str]]) -> None:
    pasts, presents = {p for p, _ in names}, {p for _, p in names}
    for kind, actual, expected in (
        ("inputs", set(runner.inputs), pasts | set(inputs)),
        ("outputs", set(runner.outputs), presents | {LOGITS}),
    ):
        odd = sorted(actual ^ expected)
        if odd:
            raise BundleError(
                f"{', '.join(odd[:4])}: in only one of the two",
                where=f"{kind} of the model and of its contract",
                fix="The model is no decoder with a cache, or not of this contract.",
            )
