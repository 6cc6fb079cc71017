"""Walk a model block by block on calibration data, with one block's weights in memory at a time.

`capture.py` makes the stream at the first block; the blocks are then applied to it one by one, and
nothing else of the model is needed.

A **use** is one application of a block. Usually each block has one; where weights are shared
(ALBERT) one block has many. `segments` groups consecutive uses so that no block lies in two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from optimizer.compress.simulate import set_module
from optimizer.compress.walk.activation_buffer import Buffer
from optimizer.errors import CheckpointError

See = Callable[[str, Tensor, Tensor], None]


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
    marks the tokens that are not padding; uses are the same blocks in every batch. exact: the
    hidden states of the float model at the same place, when a method compares with them. float:
    what products are computed in; sums and hidden states are float32 either way.
    """

    hidden: Buffer | list[Tensor]
    real: list[Tensor]
    uses: list[list[Use]]
    exact: Buffer | list[Tensor] | None = None
    float: Literal["fp32", "bf16"] = "fp32"

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


def run(
    model: nn.Module,
    stream: Stream,
    segment: range,
    see: See,
    names: Collection[str],
    shared: bool = True,
    advance: bool = False,
    exact: bool = False,
    stop: bool = False,
) -> None:
    """Apply a segment's uses to every batch and show `see` the inputs of the modules `names`.

    see(name, rows, real): rows (tokens, features) of the tokens that are real, text by text, and
    the batch's real (texts, sequence); an input without tokens is shown whole. shared: modules that
    are given the very same tensor (query, key and value) are shown once, under the name of the
    first; `sharing` tells which. advance: the stream becomes what the segment makes of it. exact:
    of the float model's hidden states instead. stop: leave a batch once the first input was seen
    (what comes after is not computed; only for a segment of one use).
    """
    states = stream.exact if exact else stream.hidden
    assert states is not None
    for i in range(len(states)):
        seen: list[Tensor] = []

        def look(name: str, x: Tensor, i: int = i, seen: list[Tensor] = seen) -> None:
            if not (shared and seen and seen[0] is x):
                with torch.autocast("cpu", enabled=False):
                    see(name, real_rows(x, stream.real[i]).float(), stream.real[i])
            seen[:] = [x]
            if stop and len(segment) == 1:
                raise _Enough

        with observed(model, names, look):
            try:
                out = _through(model, stream, segment, i, states[i])
            except _Enough:
                continue
        if advance:
            states[i] = out


def sharing(
    model: nn.Module, stream: Stream, segment: range, names: Collection[str]
) -> dict[str, str]:
    """{module: the module whose input is the very same tensor and is seen first}."""
    leader: dict[str, str] = {}
    seen: list[tuple[Tensor, str]] = []

    def look(name: str, x: Tensor) -> None:
        owner = seen[0][1] if seen and seen[0][0] is x else name
        leader.setdefault(name, owner)
        seen[:] = [(x, owner)]

    with observed(model, names, look):
        _through(model, stream, segment, 0, stream.hidden[0])
    return leader


class _Enough(Exception):
    """All that was wanted of this batch has been seen."""


def _through(
    model: nn.Module, stream: Stream, segment: range, batch: int, hidden: Tensor
) -> Tensor:
    with torch.no_grad(), stream.products:
        for use in segment:
            hidden = stream.uses[batch][use].apply(model, hidden)
    return hidden.float()


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
