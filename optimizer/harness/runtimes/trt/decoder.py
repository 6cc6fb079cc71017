"""Generation with a TensorRT engine; the KV cache stays on the device.

The KV cache has two sets of buffers: a step reads past_key_values.{i} from one and writes
present.{i} to the other, then the sets are swapped. It is never copied to the host, and copied on
the device only when the buffers grow.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...contract import Contract
from ...inputs import kv_cache
from ...inputs.batch import Array
from ..decoder import LastOfStep, check_step
from ..ort.decoder import LOGITS, check_graph
from .memory import Device, Pinned
from .profiles import choose

MASK = "attention_mask"


class TrtDecoder(LastOfStep):
    """Decoder on a TensorRT engine; see decoder.Decoder.

    session: session.Session of the engine.
    capacity: initial capacity of the buffers in tokens; they grow on demand.
    Raises BundleError if inputs or outputs of the engine and the contract differ.
    """

    def __init__(self, session: Any, contract: Contract, capacity: int = 0) -> None:
        self._session, self._driver = session, session.driver
        self._spec, self._capacity = contract.decoder, capacity
        self._names = kv_cache.list_names(self._spec.layers)
        self._inputs = [i.name for i in contract.inputs]
        check_graph(session, self._inputs, self._names)
        self._read = {past: Device(self._driver) for past, _ in self._names}
        self._written = {past: Device(self._driver) for past, _ in self._names}
        plain = (*self._inputs, LOGITS)
        self._device = {n: Device(self._driver) for n in plain}
        self._pinned = {n: Pinned(self._driver) for n in plain}
        self._room = self._rows = 0  # capacity in tokens, and rows
        self.past = 0

    def step(self, arrays: Mapping[str, Array]) -> Array:
        rows, sequence = check_step(arrays, self._inputs, self.past, self._rows)
        shapes = {n: tuple(a.shape) for n, a in arrays.items()}
        shapes |= {past: self._shape(rows, self.past) for past, _ in self._names}
        profile = choose(self._session.profiles, shapes)
        self._rows = rows
        self._make_room(self.past + sequence)
        context = self._session.context(profile, repeats=False)
        output_shapes = self._session.set_shapes(context, shapes)
        logits = self._forward(context, arrays, output_shapes[LOGITS])
        self._read, self._written = self._written, self._read
        self.past += sequence
        return logits

    def _forward(self, context: Any, arrays: Mapping[str, Array], shape: tuple[int, ...]) -> Array:
        """Run one step of the engine and return the logits on the host."""
        driver, dtype = self._driver, self._session.outputs[LOGITS]
        for name, array in arrays.items():
            typed = array.astype(self._session.inputs[name], copy=False)
            self._device[name].room(typed.nbytes)
            self._pinned[name].room(typed.nbytes)
            self._pinned[name].fill(typed)
            driver.to_device(self._device[name].address, self._pinned[name].address, typed.nbytes)
        size = int(np.prod(shape)) * dtype.itemsize
        self._device[LOGITS].room(size)
        self._pinned[LOGITS].room(size)
        addresses = {n: buffer.address for n, buffer in self._device.items()}
        for past, present in self._names:
            addresses[past] = self._read[past].address
            addresses[present] = self._written[past].address
        self._session.enqueue(context, addresses)
        driver.to_host(self._pinned[LOGITS].address, self._device[LOGITS].address, size)
        driver.wait()
        return self._pinned[LOGITS].array(shape, dtype).astype(np.float32, copy=False)

    def cache(self) -> dict[str, Array]:
        arrays: dict[str, Array] = {}
        if not self.past:
            return arrays
        host = Pinned(self._driver)
        for past, present in self._names:
            dtype, shape = self._session.inputs[past], self._shape(self._rows, self.past)
            size = int(np.prod(shape)) * dtype.itemsize
            host.room(size)
            self._driver.to_host(host.address, self._read[past].address, size)
            self._driver.wait()
            arrays[present] = host.array(shape, dtype)
        host.close()
        return arrays

    def close(self) -> None:
        for buffers in (self._read, self._written, self._device):
            for buffer in buffers.values():
                buffer.close()
        for pinned in self._pinned.values():
            pinned.close()

    def _shape(self, rows: int, tokens: int) -> tuple[int, int, int, int]:
        return rows, self._spec.kv_heads, tokens, self._spec.head_dim

    def _make_room(self, total: int) -> None:
        """Grow both sets of the engine's GPU buffers to at least `total` tokens, copying the KV
        cache."""
        if total <= self._room:
            return
        self._room = max(total, self._capacity, 2 * self._room)
        if MASK in self._inputs:  # as long as the cache
            room = self._rows * self._room * self._session.inputs[MASK].itemsize
            self._device[MASK].room(room)
            self._pinned[MASK].room(room)
        for past, _ in self._names:
            item = self._session.inputs[past].itemsize
            size = int(np.prod(self._shape(self._rows, self._room))) * item
            old, new = self._read[past], Device(self._driver)
            new.room(size)
            used = int(np.prod(self._shape(self._rows, self.past))) * item
            self._driver.on_device(new.address, old.address, used)
            self._read[past] = new
            old.close()  # waits for the copy
            self._written[past].room(size)
