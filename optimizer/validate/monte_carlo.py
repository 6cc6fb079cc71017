"""How far two correct runs of one model may lie apart: measured by Monte Carlo arithmetic (Parker
1997, "Monte Carlo arithmetic: exploiting randomness in floating-point arithmetic").

The torch model runs several times. Each time the result of every float operation is moved at
random by up to one unit roundoff of the arithmetic in question. Summing n terms one after another,
in any order, adds u^2 / 3 of each partial sum's square to the variance: n^2 / 2 of the terms'
variance, and n / 3 of the sum's own square where they have a mean. So the terms of every sum are
moved by up to sqrt(n / 2) roundoffs, and the sum by up to sqrt(n / 3).
Whatever rounding can do to an output, through whatever layers, is in those runs.

A value that rounding moves across a tie gets the next integer, and the layers behind it multiply
that. A run of a few texts meets few ties, so each run also moves one value of every quantized
input of every example by one step (of every token, where single tokens will be judged): the effect
of a flip is measured, not left to luck.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from optimizer.compress.simulate import QuantLinear
from optimizer.validate import trace
from optimizer.validate.distance import Array
from optimizer.validate.roundoff import UNIT

SUMS = {  # operators that sum: how many terms, and which arguments hold them
    "aten::mm": (0, 1),
    "aten::bmm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::baddbmm": (1, 2),
    "aten::sum": (0,),
    "aten::mean": (0,),
    "aten::native_layer_norm": (0,),
}
EXACT = {
    *("clone", "_to_copy", "copy", "copy_", "cat", "stack", "where", "masked_fill", "embedding"),
    *("index", "index_select", "gather", "repeat", "roll", "tril", "triu", "abs", "neg", "relu"),
    *("maximum", "minimum", "clamp", "clamp_min", "clamp_max", "amax", "amin", "max", "min"),
    *("zeros", "ones", "full", "empty", "zeros_like", "ones_like", "full_like", "empty_like"),
    *("new_zeros", "new_ones", "new_full", "new_empty", "arange", "scalar_tensor", "lift_fresh"),
    *("constant_pad_nd", "sign", "round", "floor", "ceil", "fill_", "zero_", "sort", "topk"),
    *("_unsafe_index", "index_put_", "index_put", "scatter", "eye", "linspace", "rand", "uniform_"),
}
"""Operators that move values or make them, and round none."""
ELEMENTARY = {"gelu", "silu", "tanh", "erf", "sigmoid", "exp", "log", "sin", "cos", "softplus"}
TABLE = (1 << 21) - 19  # random numbers drawn per run; no width divides it
ULPS = 4  # an elementary function of a vector library is within 4 units in the last place


@dataclass(frozen=True)
class Arithmetic:
    """unit: roundoff of stored values. sums: of the sums inside products. parameters: whether they
    are stored in less than float32, so rounded too. blocks: {module: size} of the int8 blocks in
    which the kernel of a weight-only module quantizes its input. replaced: {parameter: roundoffs},
    as a share of its rms, that computing it beforehand cost. shifts: {module: bias (out,)} that
    also takes back an input's offset: the product alone is larger than the result. flips: who
    meets a flip in every quantized input."""

    unit: float = UNIT["fp32"]
    sums: float = UNIT["fp32"]
    blocks: Mapping[str, int] = field(default_factory=dict)
    replaced: Mapping[str, float] = field(default_factory=dict)
    shifts: Mapping[str, Tensor] = field(default_factory=dict)
    flips: Literal["example", "token"] = "example"

    @property
    def coarse(self) -> bool:
        return self.unit > UNIT["fp32"]


class _Rounding(TorchDispatchMode):
    """Moves the result of every float operation while it is not paused."""

    def __init__(self, arithmetic: Arithmetic, generator: torch.Generator) -> None:
        super().__init__()
        self._arithmetic, self.generator, self.paused = arithmetic, generator, 0
        self._table = torch.empty(TABLE).uniform_(-1, 1, generator=generator)

    def noise(self, like: Tensor) -> Tensor:
        """Uniform in [-1, 1]: a stretch of the table from a place chosen at random, because drawing
        takes longer than what it is added to."""
        count, start = like.numel(), int(torch.randint(TABLE, (), generator=self.generator))
        repeated = -(-(count + start) // TABLE)
        table = self._table.repeat(repeated) if repeated > 1 else self._table
        return table[start : start + count].reshape(like.shape).to(like.dtype)

    def moved(self, value: Tensor, by: float) -> Tensor:
        """value, each element by up to `by` of itself."""
        if not value.is_floating_point() or not by:
            return value
        found = torch.addcmul(value, value, self.noise(value), value=by)
        limits = torch.finfo(value.dtype)
        return found.clamp_(limits.min, limits.max)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        name = func._schema.name
        self.paused += 1
        try:
            return self._run(func, name, list(args), kwargs)
        finally:
            self.paused -= 1

    def _run(self, func: Any, name: str, args: list[Any], kwargs: Any) -> Any:
        for i in SUMS.get(name, ()):
            if isinstance(args[i], Tensor):
                by = self._arithmetic.sums * math.sqrt(_terms(name, args) / 2)
                args[i] = self.moved(args[i], by)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and (name in SUMS or name == "aten::_softmax"):
            result = self._summed(result, _terms(name, args), rows=name == "aten::_softmax")
        short = name.removeprefix("aten::")
        written = [r for r in func._schema.returns if r.alias_info is not None]
        if any(not r.alias_info.is_write for r in written):
            return result  # a view
        if short in EXACT and not (short == "embedding" and self._arithmetic.coarse):
            return result
        if written:
            if isinstance(result, Tensor) and result.is_floating_point():
                result.copy_(self.moved(result, self._arithmetic.unit))
            return result
        if isinstance(result, Tensor):
            return self._stored(short.removesuffix("_"), args, result)
        if isinstance(result, tuple) and result and isinstance(result[0], Tensor):
            return (self.moved(result[0], self._arithmetic.unit), *result[1:])
        return result

    def _summed(self, result: Tensor, terms: int, *, rows: bool) -> Tensor:
        """What sums of so many terms round themselves. rows: one sum divides a whole row."""
        by = self._arithmetic.sums * math.sqrt(terms / 3)
        if not rows:
            return self.moved(result, by)
        return torch.addcmul(result, result, self.noise(result[..., :1]), value=by)

    def _stored(self, name: str, args: list[Any], result: Tensor) -> Tensor:
        if not result.is_floating_point():
            return result
        result = self.moved(result, self._arithmetic.unit)
        if name not in ELEMENTARY or not isinstance(args[0], Tensor):
            return result
        # A library's polynomial is as exact as the largest value it adds: of gelu and silu the
        # input, of the others about 1.
        size = args[0].abs() if name in ("gelu", "silu", "softplus") else torch.ones_like(result)
        size = torch.maximum(size, result.abs()).clamp(max=1e30)
        near = size if name in ("gelu", "silu", "softplus") else torch.minimum(size, result.abs())
        scale = near if name == "exp" else size
        return torch.addcmul(result, scale, self.noise(result), value=ULPS * UNIT["fp32"])


def _terms(name: str, args: list[Any]) -> int:
    """How many terms a sum has."""
    first = args[SUMS.get(name, (0,))[0]]
    reduced = first.shape[-1] if first.ndim else 1
    if name in ("aten::sum", "aten::mean"):
        axes = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else range(first.ndim)
        reduced = math.prod(first.shape[a] for a in axes) if first.ndim else 1
    return max(int(reduced), 1)


def runs(
    model: nn.Module,
    batches: Sequence[Mapping[str, Array]],
    outputs: Collection[str],
    modules: Collection[str],
    arithmetic: Arithmetic,
    count: int,
    seed: int = 0,
) -> list[list[dict[str, Array]]]:
    """[run][batch]: the named outputs of a correct run in `arithmetic`, `count` times.

    modules: the linear ones, which a graph multiplies by. The model is left as it was.
    """
    results: list[list[dict[str, Array]]] = []
    for run in range(count):
        generator = torch.Generator().manual_seed(seed * 1000 + run)
        mode = _Rounding(arithmetic, generator)
        with _parameters(model, mode, arithmetic), _linears(model, modules, mode, arithmetic) as at:
            results.append([])
            for batch in batches:
                at.mask = torch.from_numpy(np.asarray(batch["attention_mask"])).bool()
                with mode:
                    results[-1].append(trace.run(model, batch, outputs))
    return results


def between(
    model: nn.Module,
    traces: Sequence[trace.Trace],
    outputs: Collection[str],
    arithmetic: Arithmetic,
    count: int,
    seed: int = 0,
) -> list[list[dict[str, Array]]]:
    """[run][trace]: what enters each linear module ("<module>:input") and the outputs, when every
    linear module answers what the trace says, rounded to the arithmetic's type."""
    results: list[list[dict[str, Array]]] = []
    modules = {name for name, _ in traces[0].outputs}
    for run in range(count):
        generator = torch.Generator().manual_seed(seed * 1000 + run)
        mode = _Rounding(arithmetic, generator)
        with _parameters(model, mode, arithmetic), _answered(model, modules, mode) as answers:
            results.append([])
            for one in traces:
                answers.trace, answers.calls, answers.inputs = one, {}, {}
                with mode:
                    result = trace.run(model, one.given, outputs)
                results[-1].append({**result, **answers.inputs})
    return results


@dataclass
class _Place:
    mask: Tensor = field(default_factory=lambda: torch.ones(1, 1, dtype=torch.bool))


@contextmanager
def _linears(
    model: nn.Module, modules: Collection[str], mode: _Rounding, arithmetic: Arithmetic
) -> Iterator[_Place]:
    """Linear modules in that arithmetic: what they compute inside is bounded as a whole."""
    place = _Place()

    def before(name: str) -> Callable[..., tuple[Tensor, ...]]:
        block = arithmetic.blocks.get(name, 0)
        # Without an offset to subtract in float32, x / step is one more stored value.
        values = 1 + (arithmetic.coarse and name not in arithmetic.shifts)

        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            mode.paused += 1
            x = args[0]
            for _ in range(values):
                x = mode.moved(x, arithmetic.unit)
            step = _step(module, x, block)
            if step is not None:
                x = _flipped(x, step, place.mask, mode, arithmetic.flips == "token")
            return (_in_blocks(module, x, block), *args[1:]) if block else (x, *args[1:])

        return hook

    def after(name: str) -> Callable[..., Tensor]:
        shift = arithmetic.shifts.get(name)
        stored = None if shift is None else arithmetic.unit * shift * mode.noise(shift)

        def hook(module: nn.Module, args: tuple[Tensor, ...], result: Tensor) -> Tensor:
            weight = module.weight
            assert isinstance(weight, Tensor)
            inputs, width = args[0].norm(dim=-1, keepdim=True), weight.shape[1]
            # sum of x_i^2 w_i^2 where neither knows the other; sums move each term by sqrt(n / 2)
            # roundoffs, coarser storage moves each operand by one.
            terms = inputs * weight.float().norm(dim=1) / math.sqrt(width)
            by = arithmetic.sums * math.sqrt(width / 2)
            by += math.sqrt(2) * arithmetic.unit if arithmetic.coarse else 0.0
            if shift is not None and stored is not None:
                result = mode.moved(result - shift, arithmetic.unit) + shift + stored
            result = result + by * terms * mode.noise(result)
            result = mode.moved(result, arithmetic.unit + arithmetic.sums * math.sqrt(width / 3))
            mode.paused -= 1
            return result

        return hook

    with ExitStack() as hooks:
        for name in modules:
            module = model.get_submodule(name)
            hooks.callback(module.register_forward_pre_hook(before(name)).remove)
            hooks.callback(module.register_forward_hook(after(name)).remove)
        yield place


@contextmanager
def quantized_in_kernels(model: nn.Module, blocks: Mapping[str, int]) -> Iterator[None]:
    """The model as kernels run it that quantize the inputs of weight-only modules by themselves,
    without any rounding else. blocks: see Arithmetic."""

    def before(block: int) -> Callable[..., tuple[Tensor, ...]]:
        return lambda module, args: (_in_blocks(module, args[0], block), *args[1:])

    with ExitStack() as hooks:
        for name, block in blocks.items():
            module = model.get_submodule(name)
            hooks.callback(module.register_forward_pre_hook(before(block)).remove)
        yield


def _step(module: nn.Module, x: Tensor, block: int) -> Tensor | None:
    """One step of the integers that x becomes, as a change of x (..., 1) or (..., in); None where
    it stays float."""
    if not isinstance(module, QuantLinear):
        return None
    if module.covered is not None:
        step = torch.full_like(x[..., :1], module.covered.scale)
    elif module.activations == "token":
        scaled = x if module.factor is None else x * module.factor
        step = scaled.abs().amax(-1, keepdim=True) / 127
    elif block:
        step = x.abs().amax(-1, keepdim=True) / 127
    else:
        return None
    return step if module.factor is None else step / module.factor


def _flipped(x: Tensor, step: Tensor, mask: Tensor, mode: _Rounding, every: bool) -> Tensor:
    """x with one value of one real token of each example moved by a step, or of every token."""
    if x.shape[:-1] != mask.shape:
        mask = torch.ones(x.shape[:-1] if x.ndim > 2 else (1, len(x)), dtype=torch.bool)
    rows = x.reshape(*mask.shape, -1).clone()
    steps = step.expand_as(x).reshape(rows.shape)
    channels = torch.randint(rows.shape[-1], mask.shape, generator=mode.generator)[..., None]
    signs = torch.randint(2, channels.shape, generator=mode.generator) * 2 - 1
    if not every:
        lottery = torch.rand(mask.shape, generator=mode.generator).masked_fill(~mask, -1)
        signs = signs * (lottery == lottery.amax(1, keepdim=True))[..., None]
    rows.scatter_add_(-1, channels, signs * steps.gather(-1, channels))
    return rows.reshape(x.shape)


def _in_blocks(module: nn.Module, x: Tensor, block: int) -> Tensor:
    """x, times its module's factor, as int8 in blocks along the last axis, and back."""
    factor, width = getattr(module, "factor", None), x.shape[-1]
    if factor is not None:
        x = x * factor
    padded = nn.functional.pad(x, (0, -width % block))
    blocks = padded.reshape(*x.shape[:-1], -1, block)
    step = blocks.abs().amax(-1, keepdim=True) / 127
    step = torch.where(step > 0, step, torch.ones_like(step))
    x = ((blocks / step).round() * step).reshape(padded.shape)[..., :width]
    return x if factor is None else x / factor


@contextmanager
def _parameters(model: nn.Module, mode: _Rounding, arithmetic: Arithmetic) -> Iterator[None]:
    """Vectors rounded to the storage type, and what was computed beforehand to its own error;
    matrices are covered by the products that use them."""
    old: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        growth = arithmetic.replaced.get(name, 0.0)
        coarse = arithmetic.coarse and parameter.ndim == 1
        if not growth and not coarse:
            continue
        old[name] = parameter.data
        value = mode.moved(parameter.data, arithmetic.unit if coarse else 0.0)
        rms = parameter.data.norm() / math.sqrt(max(parameter.numel(), 1))
        parameter.data = value + growth * UNIT["fp32"] * rms * mode.noise(value)
    try:
        yield
    finally:
        for name, value in old.items():
            model.get_parameter(name).data = value


@dataclass
class _Answers:
    trace: trace.Trace | None = None
    calls: dict[str, int] = field(default_factory=dict)
    inputs: dict[str, Array] = field(default_factory=dict)


@contextmanager
def _answered(model: nn.Module, modules: Collection[str], mode: _Rounding) -> Iterator[_Answers]:
    """Each linear module notes its input and answers what the trace says."""
    answers = _Answers()

    def before(_module: nn.Module, _args: tuple[Tensor, ...]) -> None:
        mode.paused += 1

    def after(name: str) -> Callable[..., Tensor]:
        def hook(_module: nn.Module, args: tuple[Tensor, ...], result: Tensor) -> Tensor:
            one = answers.trace
            assert one is not None
            use = answers.calls[name] = answers.calls.get(name, -1) + 1
            answers.inputs[f"{name}:input:{use}"] = (
                args[0].detach().numpy().reshape(one.inputs[name, use].shape)
            )
            wanted = torch.from_numpy(np.ascontiguousarray(one.outputs[name, use]))
            mode_unit = mode._arithmetic.unit
            value = mode.moved(wanted.reshape(result.shape), mode_unit)
            mode.paused -= 1
            return value

        return hook

    with ExitStack() as hooks:
        for name in modules:
            module = model.get_submodule(name)
            hooks.callback(module.register_forward_pre_hook(before).remove)
            hooks.callback(module.register_forward_hook(after(name)).remove)
        yield answers
