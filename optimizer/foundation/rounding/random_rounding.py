"""Float arithmetic whose every operation rounds at random (Monte Carlo arithmetic).

validate/ledger/limits/monte_carlo.py uses it to bound the distance between correct runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from optimizer.foundation.rounding.tolerance import UNIT

CONVOLUTION = "aten::convolution"
SUMS = {  # operators that sum: indices of the arguments that hold the terms
    "aten::mm": (0, 1),
    "aten::bmm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::baddbmm": (1, 2),
    "aten::sum": (0,),
    "aten::mean": (0,),
    "aten::native_layer_norm": (0,),
    CONVOLUTION: (0, 1),
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
"""Operators that move or create values without rounding."""
ELEMENTARY = {"gelu", "silu", "tanh", "erf", "sigmoid", "exp", "log", "sin", "cos", "softplus"}
TABLE = (1 << 21) - 19  # random numbers, drawn once for all runs; no width divides it
ULPS = 4  # an elementary function of a vector library is within 4 units in the last place


@cache
def _numbers() -> Tensor:
    """Return TABLE random numbers, uniform in [-1, 1], twice in a row, so that a slice that begins
    near the end continues at the start. Each run starts its slices at places of its own."""
    generator = torch.Generator().manual_seed(0)
    return torch.empty(TABLE).uniform_(-1, 1, generator=generator).repeat(2)


@dataclass(frozen=True)
class Arithmetic:
    """Rounding errors of one runtime's arithmetic, which correct runs draw at random.

    unit: relative error of a stored value
    sums: relative error of an addition inside matrix products
    blocks: {module: size} of the int8 blocks in which the kernel of a weight-only module quantizes
        its input
    replaced: {parameter: rounding error of computing it in advance, as a share of its rms}
    shifts: {module: bias (out,)} that also subtracts an input's offset, so that the product alone
        is larger than the result
    flips: True: one value of a quantized input moves by one step, per example or per token
    operands: True: operands of products are rounded to `unit` too
    """

    unit: float = UNIT["fp32"]
    sums: float = UNIT["fp32"]
    blocks: Mapping[str, int] = field(default_factory=dict)
    replaced: Mapping[str, float] = field(default_factory=dict)
    shifts: Mapping[str, Tensor] = field(default_factory=dict)
    flips: Literal["example", "token"] = "example"
    operands: bool = False

    @property
    def coarse(self) -> bool:
        """True where a correct run rounds values to fewer bits than float32 has."""
        return self.unit > UNIT["fp32"]


class RandomRounding(TorchDispatchMode):
    """Torch dispatch mode that perturbs the result of every float operation inside its context,
    except between `pause` and `resume`."""

    def __init__(self, arithmetic: Arithmetic, seed: int) -> None:
        super().__init__()
        self.arithmetic, self._paused = arithmetic, False
        self.generator = torch.Generator().manual_seed(seed)

    def place(self) -> int:
        """Draw for a correct run a random place in the table of random numbers, where the noise of
        one array starts."""
        return int(torch.randint(TABLE, (), generator=self.generator))

    def noise(self, like: Tensor, start: int | None = None) -> Tensor:
        """Return random rounding errors: uniform numbers in [-1, 1] of the shape of `like`. They
        are a slice of the table, because drawing new numbers takes longer than the perturbed
        operation.

        start: place of the first number; None for a random one
        """
        start = self.place() if start is None else start % TABLE
        count = like.numel()
        table = _numbers()
        repeated = -(-(count + start) // len(table))
        table = table.repeat(repeated) if repeated > 1 else table
        return table[start : start + count].reshape(like.shape).to(like.dtype)

    def moved(self, value: Tensor, by: float, start: int | None = None) -> Tensor:
        """Return `value` as a randomly rounded run may have it: each element changed at random by
        up to the fraction `by` of itself; integers stay unchanged.

        start: see noise
        """
        if not value.is_floating_point() or not by:
            return value
        start = self.place() if start is None else start
        if value.is_contiguous() and value.numel() > TABLE:  # logits: their noise would be as large
            perturbed = torch.empty_like(value)
            # parts as long as the table, so the noise of each begins at the same place
            for own, part in zip(
                *(t.view(-1).split(TABLE) for t in (value, perturbed)), strict=True
            ):
                torch.addcmul(own, own, self.noise(own, start), value=by, out=part)
        else:
            perturbed = torch.addcmul(value, value, self.noise(value, start), value=by)
        total = float(perturbed.sum())
        if math.isfinite(total):  # and so is every value
            return perturbed
        if math.isnan(total):  # of infinity, as in masks, moved by infinity
            perturbed = torch.where(value.isinf(), value, perturbed)
        limits = torch.finfo(value.dtype)
        return perturbed.clamp_(limits.min, limits.max)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._run(func, func._schema.name, list(args), kwargs or {})

    def pause(self) -> None:
        """Run operations without random rounding and without dispatch cost until `resume`."""
        super().__exit__(None, None, None)
        self._paused = True

    def resume(self) -> None:
        """Round operations at random again after `pause`."""
        super().__enter__()
        self._paused = False

    def __exit__(self, *error: Any) -> None:
        if not self._paused:  # paused after an error inside a linear module
            super().__exit__(*error)

    def _run(self, func: Any, name: str, args: list[Any], kwargs: Any) -> Any:
        """Run a torch operation on arguments, and return its result, with random rounding errors.
        Views, and results that are exact in floating point, stay as they are."""
        for i in SUMS.get(name, ()):
            if isinstance(args[i], Tensor):
                by = self.arithmetic.sums * math.sqrt(_terms(name, args) / 2)
                image = name == CONVOLUTION and not i  # given in float32, stored in `unit`
                if self.arithmetic.coarse and (image or self.arithmetic.operands):
                    by += self.arithmetic.unit
                args[i] = self.moved(args[i], by)
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and (name in SUMS or name == "aten::_softmax"):
            result = self._summed(result, _terms(name, args), rows=name == "aten::_softmax")
        short = name.removeprefix("aten::")
        written = [r for r in func._schema.returns if r.alias_info is not None]
        if any(not r.alias_info.is_write for r in written):
            return result  # a view
        if short in EXACT and not (short == "embedding" and self.arithmetic.coarse):
            return result
        if written:
            if isinstance(result, Tensor) and result.is_floating_point():
                result.copy_(self.moved(result, self.arithmetic.unit))
            return result
        if isinstance(result, Tensor):
            return self._stored(short.removesuffix("_"), args, result)
        if isinstance(result, tuple) and result and isinstance(result[0], Tensor):
            return (self.moved(result[0], self.arithmetic.unit), *result[1:])
        return result

    def _summed(self, result: Tensor, terms: int, *, rows: bool) -> Tensor:
        """Return `result`, whose elements are sums, with the rounding error of `terms` additions.

        rows: True where each row is divided by one sum, so that its elements change by one factor
        """
        by = self.arithmetic.sums * math.sqrt(terms / 3)
        if not rows:
            return self.moved(result, by)
        return torch.addcmul(result, result, self.noise(result[..., :1]), value=by)

    def _stored(self, name: str, args: list[Any], result: Tensor) -> Tensor:
        if not result.is_floating_point():
            return result
        result = self.moved(result, self.arithmetic.unit)
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
    """Return the number of terms in each sum that an operation computes, from which its random
    rounding error follows.

    name: torch's name of the operation
    args: its arguments
    """
    if name == CONVOLUTION:  # weight (out, in of a group, height, width)
        return math.prod(args[1].shape[1:])
    first = args[SUMS.get(name, (0,))[0]]
    reduced = first.shape[-1] if first.ndim else 1
    if name in ("aten::sum", "aten::mean"):
        axes = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else range(first.ndim)
        reduced = math.prod(first.shape[a] for a in axes) if first.ndim else 1
    return max(int(reduced), 1)


@contextmanager
def angles_in_float32(model: nn.Module, mode: RandomRounding) -> Iterator[None]:
    """Inside, a run with random rounding computes position angles with float32's rounding, and
    rounds the results once to the type of mode.arithmetic.

    Modules without parameters that take integers compute angles; libraries use float32 there
    whatever the model's type, because at position 64 half precision is off by a thirtieth.
    """

    def before(_module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if any(
            isinstance(a, Tensor) and not a.is_floating_point() for a in (*args, *named.values())
        ):
            mode.arithmetic = fine

    def after(_module: nn.Module, _args: Any, result: Any) -> Any:
        if mode.arithmetic is not fine:
            return result
        mode.arithmetic = arithmetic
        whole = result if isinstance(result, tuple) else (result,)
        stored = tuple(
            mode.moved(r, arithmetic.unit) if isinstance(r, Tensor) else r for r in whole
        )
        return stored if isinstance(result, tuple) else stored[0]

    arithmetic, fine = mode.arithmetic, Arithmetic()
    with ExitStack() as hooks:
        for module in model.modules():
            if next(module.parameters(), None) is None:
                hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(after).remove)
        yield
