"""Capture the input of a model's first block on calibration data, and the other arguments of each
block.

The model runs with every block replaced by a recorder; only the first block, and the modules before
it, are in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from optimizer.compress.walk.activation_buffer import Buffer
from optimizer.compress.walk.blocks import BlockUse, CalibrationStream, get_hidden
from optimizer.compress.walk.consumed import count_batch
from optimizer.compress.walk.model_source import ModelSource
from optimizer.foundation.errors import CheckpointError
from optimizer.harness.inputs.image import ARRAY
from optimizer.harness.inputs.kind import InputKind
from optimizer.model.checkpoint.model import materialize, release
from optimizer.model.graph.module import GraphModel

Batch = Mapping[str, Tensor]
FIRST = ("hidden_states", ARRAY)
"""Keywords of a block's input: hidden states, or images where the block is the model."""


def capture(
    source: ModelSource,
    blocks: Sequence[str],
    batches: Sequence[Batch],
    hidden: Buffer | None = None,
    float_reference: Buffer | None = None,
) -> CalibrationStream:
    """Make the stream at the input of the first block.

    hidden: empty buffer for the stream; None: a list
    float_reference: empty buffer for a second stream; None: no second stream

    A decoder runs without its head (whose logits would dominate memory), and its token embedding is
    read by rows.
    """
    states: Buffer | list[Tensor] = [] if hidden is None else hidden
    stream = CalibrationStream(states, [], [], float_reference, device=source.device)
    if not batches:
        return stream
    model, tensors = source.model, source.tensors
    lookup = source.embedding if source.decodes else ""
    filled = _filled_names(source, blocks, lookup)
    for name in filled:
        materialize(model, name, tensors)
    outputs: dict[str, Any] = {}
    with _looked_up(model, lookup, tensors):
        for batch in batches:
            if isinstance(model, GraphModel):
                entering, uses = _record_graph(model, blocks, batch)
                rows = batch[model.inputs[0]]
            else:
                entering, uses = _record(source, blocks, batch, outputs)
                rows = entering
            stream.hidden.append(entering)
            if stream.float_reference is not None:
                stream.float_reference.append(entering)
            stream.uses.append(uses)
            stream.real.append(_real(source.inputs, batch, rows))
            read = batch if source.inputs.size else {}  # of texts the ids are counted
            stream.consumed.append(count_batch(read, rows, stream.real[-1]))
    for name in filled:
        release(model, name)
    return stream


def _filled_names(source: ModelSource, blocks: Sequence[str], lookup: str) -> list[str]:
    """List the parameters that the walk needs before its first segment: those outside the blocks,
    and of the first block; for a graph those that nodes before its parts read."""
    model = source.model
    if isinstance(model, GraphModel):
        return list(model.before.part.paths)
    elsewhere = (*blocks, lookup, source.family.head) if source.decodes else blocks
    outside = [
        name
        for name in model.state_dict(keep_vars=True)
        if name in source.tensors and not any(name.startswith(b + ".") for b in elsewhere)
    ]
    return [*outside, blocks[0]]


def _record_graph(
    model: GraphModel, blocks: Sequence[str], batch: Batch
) -> tuple[Tensor, list[BlockUse]]:
    """Compute the tensors that a graph's parts read, running none of them. Returns as _record."""
    with torch.no_grad():
        (first, *others), *later = model.arguments(batch)
    once: dict[int, Tensor] = {}  # what several parts read is kept once
    arguments = [
        tuple(once.setdefault(id(value), _compact(value)) for value in read)
        for read in (others, *later)
    ]
    return first, [BlockUse(n, a, {}) for n, a in zip(blocks, arguments, strict=True)]


def _real(kind: InputKind, batch: Batch, states: Tensor) -> Tensor:
    """Mask (batch, sequence) of the hidden states (batch, sequence, features) that enter the walk
    over the blocks and are not padding.

    For a kind of input that is never padded, the mask is True everywhere.
    """
    real = torch.from_numpy(kind.real({name: t.numpy() for name, t in batch.items()}))
    return real if real.ndim > 1 else real[:, None].expand(len(states), *states.shape[1:2] or (1,))


@contextmanager
def _looked_up(model: nn.Module, lookup: str, tensors: Any) -> Iterator[None]:
    """Inside, the walked model's embedding `lookup` reads only the rows of each batch from
    `tensors`, and applies its own operations to them (Gemma 2 and 3 scale the rows)."""
    if not lookup:
        yield
        return
    module: Any = model.get_submodule(lookup)
    embedded, weight, padding = module.forward, module.weight, module.padding_idx

    def of_rows(ids: Tensor) -> Any:
        rows = tensors.rows(f"{lookup}.weight", ids.reshape(-1))
        module.weight = nn.Parameter(rows, requires_grad=False)
        module.padding_idx = None  # a row of the table, which only gradients use
        try:
            return embedded(torch.arange(len(rows)).reshape(ids.shape))
        finally:
            module.weight, module.padding_idx = weight, padding

    module.forward = of_rows
    try:
        yield
    finally:
        del module.forward


def _record(
    source: ModelSource, blocks: Sequence[str], batch: Batch, outputs: dict[str, Any]
) -> tuple[Tensor, list[BlockUse]]:
    """Run the model with its blocks replaced by functions that record their arguments and return
    stand-ins; returns (input of the first block, one BlockUse per call of a block).

    The first block is computed once, because the stand-ins have the structure of its output. Blocks
    of an uneven family (Family.uneven) return other shapes than they read, so each of them is
    computed once, while `outputs` is empty. Stand-ins are zeros where the model adds parameters to
    hidden states between blocks (Family.added_between), so that the sum is that parameter.

    outputs: {block: its output on the first batch}, filled on the first call and read on later ones
    """
    uses: list[BlockUse] = []
    first: list[Tensor] = []
    uneven = source.family.uneven
    outputs = outputs if uneven else {}
    compact: dict[
        int, tuple[Any, Any]
    ] = {}  # the original, so that its id is not reused, and the compact value

    def once(value: Any) -> Any:
        return compact.setdefault(id(value), (value, _compact(value)))[1]

    def recorder(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            by_name = "" if args else next((n for n in FIRST if n in kwargs), "")
            if not args and not by_name:
                raise CheckpointError(f"{name} is called with {sorted(kwargs)}, not hidden states")
            hidden = args[0] if args else kwargs[by_name]
            first[:] = first or [hidden]
            like = name if uneven else ""
            if like not in outputs:
                with _filled(source, name, blocks[0]):
                    outputs[like] = forward(*args, **kwargs)
            kept = {k: once(v) for k, v in kwargs.items() if k != by_name}
            # blocks give zeros there, so that what reaches the next one was added between
            added = _compact(hidden) if source.family.added_between and uses else None
            uses.append(BlockUse(name, tuple(map(once, args[1:])), kept, by_name, added))
            output = outputs[like]
            if uneven:
                shape = get_hidden(output).shape
                hidden = hidden.new_zeros((len(hidden), *shape[1:]))
            if source.family.added_between:
                hidden = torch.zeros_like(hidden)
            if isinstance(output, Mapping):  # of a base model, whose heads read it by name
                return type(output)(**{**output, next(iter(output)): hidden})
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        return record

    for name in blocks:
        block: Any = source.model.get_submodule(name)
        block.forward = recorder(name, block.forward)
    try:
        with torch.no_grad():
            if source.decodes:
                source.base(**batch, use_cache=False)
            elif uneven:  # modules behind the blocks do not fit their output
                source.base(**batch)
            else:
                source.model(**batch)
    finally:
        for name in blocks:
            del source.model.get_submodule(name).forward
    return first[0], uses


@contextmanager
def _filled(source: ModelSource, block: str, filled: str) -> Iterator[None]:
    """Inside, `block` of the walked model holds its weights. filled: block that holds its weights
    already"""
    if block == filled:
        yield
        return
    materialize(source.model, block, source.tensors)
    try:
        yield
    finally:
        release(source.model, block)


def _compact(value: Any) -> Any:
    """Return an argument of the walk's blocks whose slices along an axis are equal (an expanded
    mask) as a view of one slice; other values unchanged.

    An attention mask (batch, 1, sequence, sequence) would otherwise be larger than the activations.
    """
    if not isinstance(value, Tensor):
        return value
    kept = value
    for axis in range(value.ndim):
        if kept.shape[axis] > 1 and bool((kept == kept.narrow(axis, 0, 1)).all()):
            kept = kept.narrow(axis, 0, 1)
    return kept.clone().expand(value.shape) if kept is not value else value
