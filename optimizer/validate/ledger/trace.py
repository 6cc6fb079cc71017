"""Run a torch model and record the inputs and outputs of its linear modules.

    model, batch, names -> Trace

A decoder's result includes its KV cache under the names of a graph: present.{i}.key and .value,
(batch, kv_heads, tokens, head_dim). Called by materials.py and the laws.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from optimizer.compress.simulate import QuantConvolution
from optimizer.compress.walk.blocks import select_real_rows
from optimizer.harness.inputs.batch import Batch
from optimizer.harness.inputs.kv_cache import is_past, is_present, past_of
from optimizer.validate.decoder import read_cache
from optimizer.validate.ledger import distance
from optimizer.validate.ledger.distance import Array


@dataclass
class Trace:
    """One run of a torch model on a batch.

    mask: (batch, sequence), 1 for real tokens and 0 for padding; (batch,) without padding
    batch: inputs of the model by name
    result: outputs of the model by name
    inputs, outputs: {(module, use): array} of linear modules, (batch, sequence, width), or of
        images (batch, channels, height, width); use counts the calls of a shared module
    past: tokens in the KV cache of `batch` and not in these arrays
    by_column: True for a graph that counts positions by column, so that its cached keys of padded
        rows differ from torch's (cut.GraphSummary)
    start: trace from the first token on; None where `past` is 0
    """

    mask: Array
    batch: Mapping[str, Array]
    result: dict[str, Array] = field(default_factory=dict)
    inputs: dict[tuple[str, int], Array] = field(default_factory=dict)
    outputs: dict[tuple[str, int], Array] = field(default_factory=dict)
    past: int = 0
    by_column: bool = False
    start: Trace | None = None

    def examples(self, array: Array) -> list[Array]:
        """Split an output into one array per row, without padding. Of a KV cache, rows with padding
        are left out where by_column."""
        if self._is_cache(array):
            mask = self.batch["attention_mask"]
            rows = distance.split_examples(array.swapaxes(1, 2), mask)
            return [rows[i] for i in self.rows(array)]
        return distance.split_examples(array, self.mask)

    def _is_cache(self, array: Array) -> bool:
        return array.ndim == 4 and self.mask.ndim > 1 and "attention_mask" in self.batch

    def rows(self, array: Array) -> list[int]:
        """Numbers of the rows whose real tokens `examples` returns."""
        if self._is_cache(array) and self.by_column:
            return [i for i, row in enumerate(self.batch["attention_mask"]) if row.all()]
        return list(range(len(array)))

    def pairs(self, actual: Array, expected: Array) -> list[tuple[Array, Array]]:
        """Return [(actual, expected)] row by row, without padding. Arrays of different sizes are
        one pair, which Distance measures as infinitely far."""
        if actual.size != expected.size:
            return [(actual, expected)]
        rows = self.examples(actual.reshape(expected.shape)), self.examples(expected)
        return list(zip(*rows, strict=True))

    def continued(self, past: int) -> Trace:
        """Return the trace of the same tokens, of which the first `past` of each row are in a KV
        cache and the others are inputs."""

        def rest(arrays: Mapping[Any, Array]) -> dict[Any, Array]:
            return {name: a[:, past:] for name, a in arrays.items()}

        batch = {n: a for n, a in self.batch.items() if not is_past(n)}
        cache = {n: a for n, a in self.result.items() if is_present(n)}
        others = {n: a for n, a in self.result.items() if n not in cache}
        return Trace(
            mask=self.mask[:, past:],
            batch={
                **rest(batch),
                "attention_mask": self.mask,
                **{past_of(n): a[:, :, :past] for n, a in cache.items()},
            },
            result={**rest(others), **cache},
            inputs=rest(self.inputs),
            outputs=rest(self.outputs),
            past=past,
            start=self,
        )

    def alone(self, row: int) -> Trace:
        """Return the trace of row number `row` alone, without `inputs` and `outputs` of modules."""

        def select(arrays: Mapping[str, Array]) -> dict[str, Array]:
            return {name: a[row : row + 1] for name, a in arrays.items()}

        return replace(
            self,
            mask=self.mask[row : row + 1],
            batch=select(self.batch),
            result=select(self.result),
            inputs={},
            outputs={},
            start=self.start and self.start.alone(row),
        )

    @property
    def complete_batch(self) -> Batch:
        """The batch that starts at the first token, padding included."""
        first = self.start or self
        return Batch(dict(first.batch), (), (), first.mask)


def run(model: nn.Module, batch: Mapping[str, Array], outputs: Collection[str]) -> dict[str, Array]:
    """Run a torch model, for the ledger, on its own device and return {name: array} of the outputs
    in `outputs`. A KV cache in `batch` is not passed to the model."""
    device = next(model.parameters()).device
    tensors = {
        name: torch.from_numpy(np.ascontiguousarray(a)).to(device)
        for name, a in batch.items()
        if not is_past(name)
    }
    kept: dict[str, Any] = {}
    if any(is_present(name) for name in outputs):
        from transformers import DynamicCache

        # the model's own cache drops tokens outside of a layer's window
        kept = {"past_key_values": DynamicCache(), "use_cache": True}
    with torch.no_grad():
        result = model(**tensors, **kept, return_dict=True)
    arrays = {name: result[name].cpu().numpy() for name in outputs if not is_present(name)}
    if len(arrays) < len(outputs):
        cache = {past_of(n): n for n in outputs if is_present(n)}
        arrays |= {cache[n]: a for n, a in read_cache(result.past_key_values).items() if n in cache}
    return arrays


def trace_run(
    model: nn.Module, batch: Batch, outputs: Collection[str], modules: Collection[str]
) -> Trace:
    """Run a torch model once and record, for the ledger, its outputs, and the inputs and outputs of
    `modules`."""
    trace = Trace(batch.real, dict(batch))
    with _hooks(model, modules, trace):
        trace.result = run(model, batch, outputs)
    return trace


def observe(
    model: nn.Module, batch: Batch, modules: Collection[str], receive: Callable[[str, Tensor], None]
) -> None:
    """Run a torch model for a law and call receive(module, input) for each of `modules`, without
    storing anything.

    receive: function of (name, real tokens (tokens, width)); of a convolution its images

    Modules that read one tensor in turn receive the same object.
    """
    real = torch.from_numpy(batch.real)
    handles = []
    last: list[Tensor] = []  # the last tensor, and its rows

    for name in modules:

        def hook(module: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
            if isinstance(module, nn.Conv2d | QuantConvolution):
                receive(name, args[0])
                return
            if not last or last[0] is not args[0]:
                last[:] = [args[0], select_real_rows(args[0], real)]
            receive(name, last[1])

        handles.append(model.get_submodule(name).register_forward_pre_hook(hook))
    try:
        run(model, batch, ())
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _hooks(model: nn.Module, modules: Collection[str], trace: Trace) -> Iterator[None]:
    handles = []
    calls: dict[str, int] = {}
    inputs, outputs = _Copies(trace.mask.shape), _Copies(trace.mask.shape)
    for name in modules:

        def keep(_m: nn.Module, args: tuple[Any, ...], out: Tensor, name: str = name) -> None:
            use = calls[name] = calls.get(name, -1) + 1
            trace.inputs[name, use] = inputs.of(args[0])
            trace.outputs[name, use] = outputs.of(out)

        handles.append(model.get_submodule(name).register_forward_hook(keep))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Copies:
    """Arrays of tensors at this moment: a model may add to one in place later. A tensor that
    several modules read in turn is copied once."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = shape
        self._last: tuple[Tensor, int, Array] | None = None

    def of(self, tensor: Tensor) -> Array:
        last = self._last
        if last is None or last[0] is not tensor or last[1] != tensor._version:
            self._last = last = (tensor, tensor._version, _by_token(tensor, self.shape).copy())
        return last[2]


def _by_token(tensor: Tensor, shape: Sequence[int]) -> Array:
    """Return a traced tensor as an array (batch, sequence, width); some models flatten it to (batch
    x sequence, width)."""
    flat = tensor.ndim == 2 and len(shape) == 2 and len(tensor) == shape[0] * shape[1]
    array: Array = (tensor.reshape(*shape, -1) if flat else tensor).detach().numpy()
    return array
