"""Generation with ONNX Runtime; the KV cache stays on the device.

The outputs present.{i}.key and .value of a step are bound as inputs past_key_values.{i} of the next
step without a copy through numpy. The model's metadata selects one of two forms:
 - default: every present is a new array, longer than its past by the new tokens (any graph);
 - "kv_cache": "shared": past and present share one buffer of full capacity, and the graph writes
   new rows in place (GroupQueryAttention). attention_mask gives the length. Savings:
   docs/decisions/0004.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from ...contract import Contract, Generation
from ...errors import BundleError
from ...inputs import kv_cache
from ...inputs.batch import Array
from ..decoder import LastOfStep, check_step

LOGITS = "logits"
FIRST_SCORED = "first_scored"
"""Input that a run may leave out, and key of the model's metadata: the first new token whose logits
are computed (lower/onnx/optional/last_logits.py)."""
LAST = np.array([-1], np.int64)
SHARED = ("kv_cache", "shared")  # key and value in the model's metadata


class ModelPorts(Protocol):
    """Interface of a model open in ONNX Runtime with named inputs and outputs."""

    @property
    def inputs(self) -> Mapping[str, Any]: ...
    @property
    def outputs(self) -> list[str]: ...


class BindableModel(ModelPorts, Protocol):
    """Interface of an open ONNX Runtime model; see OrtRunner."""

    device: str

    @property
    def adapters(self) -> Mapping[str, BindableModel]: ...
    @property
    def metadata(self) -> dict[str, str]: ...
    def binding(self) -> Any: ...
    def value(self, array: Array) -> Any: ...
    def run_bound(self, binding: Any) -> None: ...
    def run_values(self, feeds: Mapping[str, Any], fetches: Mapping[str, Any]) -> None: ...


class OrtDecoder(LastOfStep):
    """Decoder on an ONNX Runtime session; see decoder.Decoder.

    capacity: initial capacity of shared buffers in tokens; they grow on demand.
    Raises BundleError if inputs or outputs of the graph and the contract differ.
    """

    def __init__(self, runner: BindableModel, contract: Contract, capacity: int = 0) -> None:
        self._runner, self._spec = runner, contract.decoder
        self._capacity = capacity
        self._names = kv_cache.list_names(self._spec.layers)
        self._inputs = [i.name for i in contract.inputs]
        check_graph(runner, self._inputs, self._names)
        self._shared = runner.metadata.get(SHARED[0]) == SHARED[1]
        self._chooses = self._shared and FIRST_SCORED in runner.metadata
        self._cache: dict[str, Any] = {}  # name of the past -> OrtValue
        self._binding = runner.binding()
        self._rows = 0
        self.past = 0

    def step(self, arrays: Mapping[str, Array]) -> Array:
        rows, sequence = check_step(arrays, self._inputs, self.past, self._rows)
        self._rows = rows
        total = self.past + sequence
        inputs = {n: np.ascontiguousarray(a) for n, a in arrays.items()}  # alive during the run
        for name, array in inputs.items():
            self._binding.bind_cpu_input(name, array)
        logits = np.empty((rows, sequence, self._spec.vocabulary), np.float32)
        self._binding.bind_output(LOGITS, "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        self._bind_cache(total)
        self._runner.run_bound(self._binding)
        if not self._shared:  # shared buffers stay bound
            _, *present = self._binding.get_outputs()  # in binding order
            for (past, _), value in zip(self._names, present, strict=True):
                self._cache[past] = value
        self.past = total
        return logits

    def last(self, arrays: Mapping[str, Array]) -> Array:
        if not self._chooses or arrays["input_ids"].shape[1] == 1:
            return super().last(arrays)
        rows, sequence = check_step(arrays, self._inputs, self.past, self._rows)
        self._rows = rows
        self._bind_cache(self.past + sequence)
        logits = run_last(self._runner, arrays, self._cache, self._spec)
        self.past += sequence
        return logits

    def cache(self) -> dict[str, Array]:
        """Return copies of the decoder's KV cache in ONNX Runtime: present.{i}.key and .value,
        (batch, kv_heads, past, head_dim) each."""
        return {
            present: np.array(self._cache[past].numpy()[:, :, : self.past])
            for past, present in self._names
            if past in self._cache
        }

    def _bind_cache(self, total: int) -> None:
        """Bind in ONNX Runtime the KV cache as past inputs and present outputs of a step that ends
        with `total` tokens."""
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
        """Grow the decoder's shared buffers in ONNX Runtime to at least `total` tokens, copying the
        KV cache.

        Returns True if the buffers are new.
        """
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


def run_last(
    runner: BindableModel, arrays: Mapping[str, Array], cache: Mapping[str, Any], spec: Generation
) -> Array:
    """Run ONNX Runtime on tokens, added to a shared KV cache; return the logits (batch, vocabulary)
    of each row's newest.

    arrays: inputs without the KV cache
    cache: {name of the past: OrtValue}, which receives the new tokens
    spec: sizes of the decoder
    """
    logits = np.empty((len(arrays["input_ids"]), 1, spec.vocabulary), np.float32)
    presents = {present: cache[past] for past, present in kv_cache.list_names(spec.layers)}
    runner.run_values({**arrays, FIRST_SCORED: LAST, **cache}, {LOGITS: logits, **presents})
    return logits[:, -1]


def check_graph(runner: ModelPorts, inputs: list[str], names: list[tuple[str, str]]) -> None:
    """Raise BundleError if an ONNX graph's inputs and outputs differ from the contract's and the KV
    cache's.

    inputs: names of the contract's inputs
    names: (past, present) of each array of the KV cache, from kv_cache.list_names
    """
    pasts, presents = {p for p, _ in names}, {p for _, p in names}
    for kind, actual, expected in (
        ("inputs", set(runner.inputs), pasts | set(inputs)),
        ("outputs", set(runner.outputs), presents | {LOGITS}),
    ):
        different = sorted(actual ^ expected)
        if different:
            raise BundleError(
                f"only one of the two has {', '.join(different[:4])}",
                where=f"{kind} of the model and of its contract",
                fix="The model has no KV cache, or does not match its contract.",
            )
