"""Walk a model block by block on calibration data, with one block's weights in memory at a time.

`capture.py` makes the stream at the first block; the blocks are then applied to it one by one, and
nothing else of the model is needed.

A **use** is one application of a block. Usually each block has one; where weights are shared
(ALBERT) one block has many. `segments` groups consecutive uses so that no block lies in two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from optimizer.compress.simulate import QuantConvolution, QuantInput, set_module
from optimizer.compress.walk.activation_buffer import Buffer
from optimizer.compress.walk.consumed import Consumed
from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.qtensor import Scheme
from optimizer.model.architectures.family_record import Family
from optimizer.model.checkpoint.attention_operands import Operand
from optimizer.recipe.compression.sparsity import Sparsity

_OF_IMAGES = nn.Conv2d, nn.Identity, QuantConvolution, QuantInput
Hook = Callable[[str, Tensor, Tensor], None]


@dataclass(frozen=True)
class Use:
    """One application of a block: its name, and its arguments besides the hidden states, which
    come first or, with `by_name`, as the keyword hidden_states."""

    block: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    by_name: bool = False

    def apply(self, model: nn.Module, hidden: Tensor) -> Tensor:
        """The block's output for `hidden` (batch, sequence, features)."""
        block = model.get_submodule(self.block)
        if self.by_name:
            return hidden_of(block(hidden_states=hidden, **self.kwargs))
        return hidden_of(block(hidden, *self.args, **self.kwargs))


@dataclass
class Stream:
    """The calibration data on its way through the model, one entry per batch.

    hidden (batch, sequence, features) changes as the walk proceeds; real (batch, sequence) bool
    marks the tokens that are not padding; uses are the same blocks in every batch.
    float_reference: the hidden states of the float model at the same place, when a method compares
    with them. consumed: what of each batch reached the first block. float: what products are
    computed in; sums and hidden states are float32 either way.
    """

    hidden: Buffer | list[Tensor]
    real: list[Tensor]
    uses: list[list[Use]]
    float_reference: Buffer | list[Tensor] | None = None
    float: Literal["fp32", "bf16"] = "fp32"
    consumed: list[Consumed] = field(default_factory=list)

    @property
    def products(self) -> torch.autocast:
        """The context in which blocks are run."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.float == "bf16")

    @contextmanager
    def sums(self) -> Iterator[None]:
        """The context in which sums over tokens are made: float32, of inputs cast as `products`
        casts them. (Twice as fast for bf16, and its sums are not rounded.)"""
        matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]  # made at run time
        before = matmul.fp32_precision
        matmul.fp32_precision = "bf16" if self.float == "bf16" else before
        try:
            yield
        finally:
            matmul.fp32_precision = before

    @property
    def spare(self) -> int:
        """Bytes of activations that may still be kept in memory."""
        return self.hidden.budget.left if isinstance(self.hidden, Buffer) else 1 << 40

    @property
    def tokens(self) -> int:
        """Real tokens in all batches."""
        return sum(int(r.sum()) for r in self.real)


def hidden_of(out: Any) -> Tensor:
    """The hidden states in what a block returns: itself, or the first of a tuple."""
    value = out[0] if isinstance(out, tuple) else out
    if not isinstance(value, Tensor):
        raise CheckpointError(f"a block returned {type(value).__name__}, not hidden states")
    return value


def segments(uses: Sequence[Use]) -> list[range]:
    """The fewest-use groups of consecutive uses such that each block lies in one group only."""
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
    """A segment whose blocks hold their float weights.

    model: a skeleton but for `blocks`. segment: of stream.uses. schemes: {module: scheme} of the
    modules in these blocks that are quantized; sparsity: {module: the recipe's section} of those
    that are pruned. summands: the identities whose input is quantized for a
    residual add or for a product of attention.
    """

    model: nn.Module
    family: Family
    stream: Stream
    segment: range
    blocks: tuple[str, ...]
    schemes: Mapping[str, Scheme]
    sparsity: Mapping[str, Sparsity] = field(default_factory=dict)
    summands: tuple[str, ...] = ()

    @property
    def modules(self) -> tuple[str, ...]:
        """Those that are compressed, one way or the other."""
        return tuple(dict.fromkeys([*self.schemes, *self.sparsity]))

    def linear(self, name: str) -> nn.Linear:
        """The module of that name."""
        return cast(nn.Linear, self.model.get_submodule(name))

    def output(self, batch: int, hidden: Tensor) -> Tensor:
        """What the segment makes of hidden states of a batch, with gradients where they are on."""
        for use in self.segment:
            hidden = self.stream.uses[batch][use].apply(self.model, hidden)
        return hidden


def observe(group: BlockGroup, hook: Hook, names: Collection[str]) -> None:
    """hook(name, rows, real) whenever one of the modules `names` runs on the stream.

    rows (tokens, features) of the tokens that are real, text by text, and the batch's real (texts,
    sequence); an input without tokens, or one of images, is shown whole. The stream stays.
    """
    for i in range(len(group.stream.hidden)):
        _observed_output(group, i, group.stream.hidden[i], hook, names)


def observe_one(group: BlockGroup, hook: Hook, name: str) -> None:
    """As `observe`, of one module; what comes after it in the segment is not computed where each
    block is used once."""

    def stop_after(name: str, rows: Tensor, real: Tensor) -> None:
        hook(name, rows, real)
        if len(group.segment) == 1:
            raise _Observed

    for i in range(len(group.stream.hidden)):
        with suppress(_Observed):
            _observed_output(group, i, group.stream.hidden[i], stop_after, (name,))


def advance(group: BlockGroup, hook: Hook | None = None, names: Collection[str] = ()) -> None:
    """The stream becomes what the segment makes of it, observed as by `observe`."""
    states = group.stream.hidden
    for i in range(len(states)):
        states[i] = _observed_output(group, i, states[i], hook, names)


def advance_float_reference(
    group: BlockGroup, hook: Hook | None = None, names: Collection[str] = ()
) -> None:
    """As `advance`, of the float model's hidden states."""
    states = group.stream.float_reference
    assert states is not None
    for i in range(len(states)):
        states[i] = _observed_output(group, i, states[i], hook, names)


def sharing(group: BlockGroup, names: Collection[str]) -> dict[str, str]:
    """{module: the module whose input is the very same tensor and is seen first}."""
    leader: dict[str, str] = {}
    newest: list[tuple[Tensor, str]] = []

    def look(name: str, x: Tensor) -> None:
        owner = newest[0][1] if newest and newest[0][0] is x else name
        leader.setdefault(name, owner)
        newest[:] = [(x, owner)]

    with observed(group.model, names, look):
        _output(group, 0, group.stream.hidden[0])
    return leader


def sharing_of_all(group: BlockGroup, unknown: str) -> dict[str, str]:
    """`sharing` of every compressed module. unknown: what cannot be known of one that does not run.

    Raises CheckpointError naming one that does not run.
    """
    quantized = (*group.modules, *group.summands)
    leader = sharing(group, quantized)
    unused = [name for name in quantized if name not in leader]
    if unused:
        raise CheckpointError(
            f"never ran on the calibration data, so {unknown}",
            where=unused[0],
            fix="Add it to keep_float.",
        )
    return leader


def inside(module: str, blocks: Collection[str]) -> bool:
    """Whether a module lies in one of the blocks."""
    return any(module.startswith(f"{block}.") for block in blocks)


class _Observed(Exception):
    """All that is needed of this batch was observed."""


def _observed_output(
    group: BlockGroup, batch: int, hidden: Tensor, hook: Hook | None, names: Collection[str]
) -> Tensor:
    real = group.stream.real[batch]

    def show(name: str, x: Tensor) -> None:
        if hook is not None:
            with torch.autocast("cpu", enabled=False):
                module = group.model.get_submodule(name)
                images = isinstance(module, _OF_IMAGES) and not isinstance(module, Operand)
                hook(name, x.float() if images else real_rows(x, real).float(), real)

    with observed(group.model, names, show):
        return _output(group, batch, hidden)


def _output(group: BlockGroup, batch: int, hidden: Tensor) -> Tensor:
    with torch.no_grad(), group.stream.products:
        return group.output(batch, hidden).float()


@contextmanager
def observed(
    model: nn.Module, names: Collection[str], look: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """look(name, input) whenever one of the modules runs."""

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _module, args: look(name, args[0])

    handles = [model.get_submodule(n).register_forward_pre_hook(hook(n)) for n in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def real_rows(x: Tensor, real: Tensor) -> Tensor:
    """(tokens, features) of the tokens that are not padding.

    x (batch, sequence, features) or (batch * sequence, features) with real (batch, sequence). An
    input of another shape (relative positions, say) has no tokens, so no padding: all its rows.
    """
    rows = x.reshape(-1, x.shape[-1])
    if x.shape[:-1] not in (real.shape, (real.numel(),)):
        return rows
    if bool(real.all()):
        return rows.clone()  # several times as fast as choosing all of them
    return rows[real.reshape(-1)]


@contextmanager
def swapped(model: nn.Module, modules: Mapping[str, nn.Module]) -> Iterator[None]:
    """`modules` in place of those of the same names; the old ones come back."""
    old = {name: model.get_submodule(name) for name in modules}
    for name, module in modules.items():
        set_module(model, name, module)
    try:
        yield
    finally:
        for name, module in old.items():
            set_module(model, name, module)
