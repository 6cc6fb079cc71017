"""Walk a model block by block on calibration data, with one block's weights in memory at a time.

`capture.py` makes the stream at the first block; the blocks are then applied to it one by one.

A **use** is one application of a block. Usually each block has one; where weights are shared
(ALBERT) one block has many. `segments` groups consecutive uses so that no block lies in two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from optimizer.compress.simulate import QuantConvolution, QuantInput, set_module
from optimizer.compress.walk.activation_buffer import Buffer
from optimizer.compress.walk.consumed import Consumed
from optimizer.compress.walk.deal import ALL, Deal
from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.process.torch_device import CPU, move, sums_of
from optimizer.foundation.qtensor import Scheme
from optimizer.model.architectures.family_record import Family
from optimizer.model.checkpoint.attention_operands import Operand
from optimizer.recipe.compression.sparsity import Sparsity

_OF_IMAGES = nn.Conv2d, nn.Identity, QuantConvolution, QuantInput
Hook = Callable[[str, Tensor, Tensor], None]


@dataclass(frozen=True)
class BlockUse:
    """One application of a block in the forward pass that the walk follows; a shared block has
    several.

    args, kwargs: arguments without the hidden states
    by_name: keyword of the hidden states (or images); "" where they are the first argument
    added: values that the model adds to the hidden states before the block; None: none
    """

    block: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    by_name: str = ""
    added: Tensor | None = None

    def apply(self, model: nn.Module, hidden: Tensor) -> Tensor:
        """Run the block on `hidden` (batch, sequence, features), on its device."""
        block = model.get_submodule(self.block)
        args, kwargs = move((self.args, self.kwargs), hidden.device)
        if self.added is not None:
            hidden = hidden + self.added.to(hidden.device)
        if self.by_name:
            return get_hidden(block(**{self.by_name: hidden}, **kwargs))
        return get_hidden(block(hidden, *args, **kwargs))


@dataclass
class CalibrationStream:
    """Calibration data on its way through the model, one entry per batch of this process, in memory
    or on disk.

    hidden: (batch, sequence, features), replaced as the walk proceeds
    real: (batch, sequence) bool, the tokens that are not padding
    uses: applications of blocks, the same blocks in every batch
    float_reference: hidden states of the float model at the same place, if a method needs them
    float: type of products; sums and hidden states are float32 in any case
    consumed: counts of each batch at the first block
    device: device of the block that is compressed, to which one batch at a time moves
    deal: division of all batches into partial sums and among processes
    """

    hidden: Buffer | list[Tensor]
    real: list[Tensor]
    uses: list[list[BlockUse]]
    float_reference: Buffer | list[Tensor] | None = None
    float: Literal["fp32", "bf16"] = "fp32"
    consumed: list[Consumed] = field(default_factory=list)
    device: torch.device = CPU
    deal: Deal = field(default_factory=Deal)

    @property
    def products(self) -> torch.autocast:
        """Return the autocast context in which the walk runs a block: matrix products in bfloat16,
        or in float32."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.float == "bf16")

    @contextmanager
    def sums(self) -> Iterator[None]:
        """Context for sums over tokens: float32 sums of inputs cast as by `products`, on a GPU of
        inputs in TF32. (Twice as fast in bf16 as float32, without rounding the sums.)"""
        matmul, narrow = sums_of(self.device)
        before = matmul.fp32_precision
        matmul.fp32_precision = narrow if self.float == "bf16" else before
        try:
            yield
        finally:
            matmul.fp32_precision = before

    @property
    def spare(self) -> int:
        """Bytes of further activations that fit into the memory of compress.memory_gb."""
        return self.hidden.budget.left if isinstance(self.hidden, Buffer) else 1 << 40

    @property
    def tokens(self) -> int:
        """Number of real tokens in all batches of all processes."""
        return sum(self.deal.processes.gather(sum(int(r.sum()) for r in self.real)))


def get_hidden(out: Any) -> Tensor:
    """Return the hidden states in the output of a walked block: the output itself, or the first of
    a tuple or of a model's output by name."""
    value = out if isinstance(out, Tensor) else next(iter(_values(out)), out)
    if not isinstance(value, Tensor):
        raise CheckpointError(f"a block returned {type(value).__name__}, not hidden states")
    return value


def _values(out: Any) -> Iterable[Any]:
    return out.values() if isinstance(out, Mapping) else out if isinstance(out, tuple) else ()


def split_segments(uses: Sequence[BlockUse]) -> list[range]:
    """Divide the walk into segments: smallest groups of consecutive uses such that each block lies
    in one group."""
    last = {use.block: i for i, use in enumerate(uses)}
    groups: list[range] = []
    start = end = 0
    for i, use in enumerate(uses):
        end = max(end, last[use.block])
        if i == end:
            groups.append(range(start, i + 1))
            start = end = i + 1
    return groups


@dataclass(frozen=True)
class BlockGroup:
    """Segment of the walk (consecutive uses of blocks) whose float weights are in memory.

    model: skeleton, except for `blocks`
    segment: range of stream.uses
    schemes: {module to quantize: scheme}
    sparsity: {module to prune: recipe section}
    summands: identities whose input is quantized, before residual adds and products of attention
    caches: identities on keys and values that a KV cache holds in FP8
    """

    model: nn.Module
    family: Family
    stream: CalibrationStream
    segment: range
    blocks: tuple[str, ...]
    schemes: Mapping[str, Scheme]
    sparsity: Mapping[str, Sparsity] = field(default_factory=dict)
    summands: tuple[str, ...] = ()
    caches: tuple[str, ...] = ()

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules that are quantized or pruned."""
        return tuple(dict.fromkeys([*self.schemes, *self.sparsity]))

    def linear(self, name: str) -> nn.Linear:
        """The walked segment's module `name`: a linear, or a convolution."""
        return cast(nn.Linear, self.model.get_submodule(name))

    def output(self, batch: int, hidden: Tensor) -> Tensor:
        """Run the walk's segment on hidden states of a batch, with gradients where enabled."""
        hidden = hidden.to(self.stream.device)
        for use in self.segment:
            hidden = self.stream.uses[batch][use].apply(self.model, hidden)
        return hidden


def observe(group: BlockGroup, hook: Hook, names: Collection[str], part: range = ALL) -> None:
    """Call hook(name, rows, real) whenever one of the modules `names` runs on the stream's batches
    in `part`.

    rows: (tokens, features), inputs at real tokens, text by text; images and other inputs without
        tokens are complete
    real: (texts, sequence) of the batch

    The stream stays unchanged.
    """
    for i in range(len(group.stream.hidden))[part.start : part.stop]:
        _observed_output(group, i, group.stream.hidden[i], hook, names)


def observe_one(group: BlockGroup, hook: Hook, name: str, part: range = ALL) -> None:
    """Observe one module; in a segment of one use, no module runs after its last call.

    The first batch runs whole and counts the calls: DeBERTa's projections read both hidden states
    and relative positions.
    """
    calls, last = 0, 0

    def stop_after_last(name: str, rows: Tensor, real: Tensor) -> None:
        nonlocal calls
        hook(name, rows, real)
        calls += 1
        if calls == last and len(group.segment) == 1:
            raise _Observed

    for i in range(len(group.stream.hidden))[part.start : part.stop]:
        calls = 0
        with suppress(_Observed):
            _observed_output(group, i, group.stream.hidden[i], stop_after_last, (name,))
        last = calls


def advance(
    group: BlockGroup,
    hook: Hook | None = None,
    names: Collection[str] = (),
    part: range = ALL,
) -> None:
    """Replace the stream by the segment's output; batches in `part` are observed as by
    `observe`."""
    states = group.stream.hidden
    for i in range(len(states)):
        seen = names if i in part else ()
        states[i] = _observed_output(group, i, states[i], hook, seen).to(CPU)


def advance_float_reference(
    group: BlockGroup, hook: Hook | None = None, names: Collection[str] = ()
) -> None:
    """Replace the float reference by the segment's output on it, observed as by `observe`."""
    states = group.stream.float_reference
    assert states is not None
    for i in range(len(states)):
        states[i] = _observed_output(group, i, states[i], hook, names).to(CPU)


def find_sharing(group: BlockGroup, names: Collection[str]) -> dict[str, str]:
    """Return {module: first module that reads the very same tensor, in the same number of
    calls}."""
    leader: dict[str, str] = {}
    calls: Counter[str] = Counter()
    newest: list[tuple[Tensor, str]] = []

    def look(name: str, x: Tensor) -> None:
        owner = newest[0][1] if newest and newest[0][0] is x else name
        leader.setdefault(name, owner)
        calls[name] += 1
        newest[:] = [(x, owner)]

    with observed(group.model, names, look):
        _output(group, 0, group.stream.hidden[0])
    first: dict[tuple[str, int], str] = {}
    shared = {n: first.setdefault((owner, calls[n]), n) for n, owner in leader.items()}
    return group.stream.deal.processes.gather(shared)[0]  # in all processes the same


def find_all_sharing(group: BlockGroup, unknown: str) -> dict[str, str]:
    """Return {module: first module that reads the same tensor} of every compressed module.

    unknown: part of the error message for a module that does not run

    Raises CheckpointError naming a module that does not run.
    """
    quantized = (*group.modules, *group.summands)
    leader = find_sharing(group, quantized)
    unused = [name for name in quantized if name not in leader]
    if unused:
        raise CheckpointError(
            f"it did not run on the calibration data, so {unknown}",
            where=unused[0],
            fix="Add it to keep_float.",
        )
    return leader


class _Observed(Exception):
    """Raised to end the run of a calibration batch once the observed module was reached."""


def _observed_output(
    group: BlockGroup, batch: int, hidden: Tensor, hook: Hook | None, names: Collection[str]
) -> Tensor:
    """Run the segment on hidden states of a batch, with inputs of `names` passed to `hook`."""
    real = group.stream.real[batch]

    def show(name: str, x: Tensor) -> None:
        if hook is not None:
            with torch.autocast(x.device.type, enabled=False):
                module = group.model.get_submodule(name)
                images = isinstance(module, _OF_IMAGES) and not isinstance(module, Operand)
                hook(name, x.float() if images else select_real_rows(x, real).float(), real)

    with observed(group.model, names, show):
        return _output(group, batch, hidden)


def _output(group: BlockGroup, batch: int, hidden: Tensor) -> Tensor:
    with torch.no_grad(), group.stream.products:
        return group.output(batch, hidden).float()


@contextmanager
def observed(
    model: nn.Module, names: Collection[str], look: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Inside, call look(name, input of the module) whenever one of the modules runs."""

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _module, args: look(name, args[0])

    handles = [model.get_submodule(n).register_forward_pre_hook(hook(n)) for n in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def select_real_rows(x: Tensor, real: Tensor) -> Tensor:
    """Select the rows (tokens, features) of calibration activations x at tokens that are not
    padding.

    x: (batch, sequence, features) or (batch * sequence, features); all rows of another shape, such
        as relative positions
    real: (batch, sequence)
    """
    rows = x.reshape(-1, x.shape[-1])
    if x.shape[:-1] not in (real.shape, (real.numel(),)):
        return rows
    if bool(real.all()):
        return rows.clone()  # several times as fast as indexing
    return rows[real.reshape(-1).to(x.device)]


@contextmanager
def swap_modules(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """Inside, replace modules of the walked torch model by others of the same names."""
    old = {name: model.get_submodule(name) for name in modules}
    for name, module in modules.items():
        set_module(model, name, module)
    try:
        yield
    finally:
        for name, module in old.items():
            set_module(model, name, module)
