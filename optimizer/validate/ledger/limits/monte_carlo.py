"""Make correct runs of a torch model by Monte Carlo arithmetic (Parker 1997, "Monte Carlo
arithmetic: exploiting randomness in floating-point arithmetic").

    model, batches or traces, arithmetic -> outputs of each run, for correct_runs.py

In each run the result of every float operation is moved at random by up to one unit roundoff u of
the arithmetic. Summing n terms one after another, in any order, adds u^2 / 3 of each partial sum's
square to the variance: n^2 / 2 of the terms' variance, and n / 3 of the sum's own square where
they have a mean. So the terms of every sum are moved by up to sqrt(n / 2) roundoffs, and the sum
by up to sqrt(n / 3). The runs then contain any effect of rounding on an output.

A value that rounding moves across a tie gets the next integer. A run of a few texts has few ties,
so each run also moves one value of every quantized input of every example (of every token, where
tokens are judged) by one step: the effect of a flip is measured in every run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from optimizer.compress.simulate import (
    QuantConvolution,
    QuantInput,
    QuantLinear,
    find_largest_values,
    set_module,
)
from optimizer.foundation.conv_geometry import ConvGeometry
from optimizer.foundation.rounding import float4, float8
from optimizer.foundation.rounding.random_rounding import TABLE, Arithmetic, RandomRounding
from optimizer.foundation.state import PER_TOKEN
from optimizer.harness.inputs.batch import Batch
from optimizer.validate.ledger import trace
from optimizer.validate.ledger.array_file import join_arrays
from optimizer.validate.ledger.distance import Array
from optimizer.validate.ledger.pieces.roundoff import UNIT

T = TypeVar("T")
Store = Callable[[Mapping[str, Array]], Mapping[str, Array]]
"""Stores the arrays of a run as soon as they are computed: ArrayFile.put, or dict for memory."""
AT_ONCE = 2  # runs in threads, each with the activations of a batch


@dataclass(frozen=True)
class RoundedModel:
    """A model with what is needed to simulate correct runs of it, which differ by rounding alone.

    model: the model, which stays unchanged
    modules: names of the modules that a graph computes as one product (linear modules), and of its
        QuantInputs
    arithmetic: roundoff of its operations
    """

    model: nn.Module
    modules: Collection[str]
    arithmetic: Arithmetic


def make_runs(
    rounded: RoundedModel,
    batches: Sequence[Batch],
    outputs: Collection[str],
    seeds: Sequence[int],
    store: Store = dict,
) -> Iterator[list[Mapping[str, Array]]]:
    """Make one correct run per seed, on demand: a list over batches of {output: array}. The model
    is left unchanged.

    outputs: names of the outputs to keep
    store: function that stores the arrays of a batch
    """

    def one(own: nn.Module, mode: RandomRounding) -> list[Mapping[str, Array]]:
        _round_parameters(own, mode, mode.arithmetic)
        current = _add_errors(own, rounded.modules, mode, mode.arithmetic)
        results = []
        for batch in batches:
            current.mask = torch.from_numpy(batch.real)
            with mode:
                result = trace.run(own, batch, outputs)
            results.append(store(result))
        return results

    yield from _each(one, rounded, seeds)


def run_between(
    rounded: RoundedModel,
    traces: Sequence[trace.Trace],
    outputs: Collection[str],
    seeds: Sequence[int],
    store: Store = dict,
) -> Iterator[list[Mapping[str, Array]]]:
    """Make one run per seed in which each linear module returns its output in the trace, rounded to
    the arithmetic's type, so that only the operators between modules add errors. A run is a list
    over traces of {name: array} of the outputs and of module inputs, "<module>:input:<use>".

    outputs: names of the outputs to keep
    store: function that stores the arrays of a trace
    """
    modules = {name for name, _ in traces[0].outputs}

    def one(own: nn.Module, mode: RandomRounding) -> list[Mapping[str, Array]]:
        _round_parameters(own, mode, mode.arithmetic)
        answers = _Replay(store)
        for name in modules:
            set_module(own, name, _ReplayedLinear(own.get_submodule(name), name, answers, mode))
        results: list[Mapping[str, Array]] = []
        for recorded in traces:
            answers.trace, answers.calls, answers.inputs = recorded, {}, []
            with mode:
                result = trace.run(own, recorded.batch, outputs)
            results.append(join_arrays([store(result), *answers.inputs]))
        return results

    yield from _each(one, rounded, seeds)


def _each(
    one: Callable[[nn.Module, RandomRounding], T], rounded: RoundedModel, seeds: Sequence[int]
) -> Iterator[T]:
    """Yield one(model, mode), a correct run's result, for every seed; AT_ONCE seeds run at the same
    time in threads. Each call has modules and random numbers of its own, so results do not depend
    on other calls."""

    def call(seed: int) -> T:
        return one(copy_modules(rounded.model), RandomRounding(rounded.arithmetic, seed))

    for first in range(0, len(seeds), AT_ONCE):
        # torch's flags for modes are global: they are right after the threads only where all of
        # these enter and leave their modes inside another one
        with _NoMode(), ThreadPoolExecutor(AT_ONCE) as threads:
            results = list(threads.map(call, seeds[first : first + AT_ONCE]))
        yield from results


class _NoMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def copy_modules(model: nn.Module) -> nn.Module:
    """Copy, for a correct run, the tree of modules, which shares the values of its parameters with
    `model`. Hooks, replaced modules and `parameter.data` of the copy do not affect `model`."""
    copies = {module: copy(module) for module in model.modules()}
    parameters: dict[Tensor, nn.Parameter] = {}
    for module, own in copies.items():
        own.__dict__ = {k: v.copy() if isinstance(v, dict) else v for k, v in vars(module).items()}
        own._modules.update({n: copies[m] for n, m in module._modules.items() if m is not None})
        for name, value in module._parameters.items():
            if value is not None:
                shared = nn.Parameter(value.data, value.requires_grad)
                own._parameters[name] = parameters.setdefault(value, shared)
    return copies[model]


@dataclass
class _CurrentBatch:
    mask: Tensor = field(default_factory=lambda: torch.ones(1, 1, dtype=torch.bool))


def _add_errors(
    model: nn.Module, modules: Collection[str], mode: RandomRounding, arithmetic: Arithmetic
) -> _CurrentBatch:
    """Add hooks that give the linear modules the random errors of a product. The caller sets `mask`
    of the returned object for each batch."""
    place = _CurrentBatch()

    def before(name: str) -> Callable[..., tuple[Tensor, ...]]:
        block = arithmetic.blocks.get(name, 0)
        # without an offset to subtract in float32, x / step is one more stored value
        values = 1 + (arithmetic.coarse and name not in arithmetic.shifts)

        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            mode.pause()
            x = args[0]
            for _ in range(values):
                x = mode.moved(x, arithmetic.unit)
            step = _step(module, x, block)
            if step is not None:
                x = _flipped(x, step, place.mask, mode, arithmetic.flips == "token")
            return (_in_blocks(module, x, block), *args[1:]) if block else (x, *args[1:])

        return hook

    def after(name: str, weight: Tensor) -> Callable[..., Tensor]:
        shift = arithmetic.shifts.get(name)
        stored = None if shift is None else arithmetic.unit * shift * mode.noise(shift)
        width = weight[0].numel()
        # sum of x_i^2 w_i^2 for independent factors
        weights = weight.flatten(1).float().norm(dim=1) / math.sqrt(width)
        # sums move each term by sqrt(n / 2) roundoffs, coarser storage moves each operand by one
        by = arithmetic.sums * math.sqrt(width / 2)
        by += math.sqrt(2) * arithmetic.unit if arithmetic.coarse else 0.0
        of_sum = arithmetic.unit + arithmetic.sums * math.sqrt(width / 3)

        def hook(module: nn.Module, args: tuple[Tensor, ...], result: Tensor) -> Tensor:
            filters = _filters(module)
            if shift is not None and stored is not None:
                by_output, error = (_along(t, filters) for t in (shift, stored))
                result = mode.moved(result - by_output, arithmetic.unit) + by_output + error
            start, again = mode.place(), mode.place()
            rows = result if filters else result.reshape(-1, len(weights))
            inputs = args[0] if filters else args[0].reshape(-1, width)
            row = math.prod(rows.shape[1:])
            many = max(1, TABLE // row)  # a head's logits are large, and so their noise
            for first in range(0, len(rows), many):
                part, at = slice(first, first + many), first * row
                terms = _terms(inputs[part], filters, weights)
                noise = mode.noise(rows[part], start + at)
                noisy = torch.addcmul(rows[part], terms, noise, value=by)
                rows[part] = mode.moved(noisy, of_sum, again + at)
            mode.resume()
            return rows.reshape(result.shape)

        return hook

    for name in modules:
        module = model.get_submodule(name)
        module.register_forward_pre_hook(before(name))
        if isinstance(module, QuantInput):
            module.register_forward_hook(lambda *_: mode.resume())
            continue
        assert isinstance(module.weight, Tensor)
        module.register_forward_hook(after(name, module.weight))
    return place


def _filters(module: nn.Module) -> ConvGeometry | None:
    if isinstance(module, QuantConvolution):
        return module.geometry
    return ConvGeometry.read(module) if isinstance(module, nn.Conv2d) else None


def _terms(x: Tensor, filters: ConvGeometry | None, weights: Tensor) -> Tensor:
    """Compute, for a correct run's random errors, the norm of the terms of each output's sum, as if
    factors were independent.

    x: inputs of the module
    filters: geometry of a convolution; None for another module
    weights: root mean square of each output's weights
    """
    if filters is None:
        norms: Tensor = x.norm(dim=-1, keepdim=True)
        return norms * weights
    inputs = x.shape[1] // filters.groups * math.prod(filters.kernel)
    squares = filters.conv2d(x.square(), x.new_ones(filters.groups, inputs))
    norms = squares.sqrt().repeat_interleave(len(weights) // filters.groups, 1)
    return norms * _along(weights, filters)


def _along(values: Tensor, filters: ConvGeometry | None) -> Tensor:
    """Shape a correct run's error size per output (outputs,) so that it broadcasts along the
    output: along the channels of an image where `filters` is given."""
    return values if filters is None else values[:, None, None]


@contextmanager
def quantize_in_kernels(model: nn.Module, blocks: Mapping[str, int]) -> Iterator[None]:
    """Run the model, inside this context, for correct runs: as kernels do that quantize the inputs
    of weight-only modules, without other rounding.

    blocks: {weight-only module: inputs per int8 block}
    """

    def before(block: int) -> Callable[..., tuple[Tensor, ...]]:
        return lambda module, args: (_in_blocks(module, args[0], block), *args[1:])

    with ExitStack() as hooks:
        for name, block in blocks.items():
            module = model.get_submodule(name)
            hooks.callback(module.register_forward_pre_hook(before(block)).remove)
        yield


def flips_values(model: nn.Module, modules: Collection[str], arithmetic: Arithmetic) -> bool:
    """Return True where correct runs move integers by a step, because an input of one of `modules`
    is quantized."""
    each = ((model.get_submodule(name), arithmetic.blocks.get(name, 0)) for name in modules)
    return any(
        isinstance(module, QuantLinear | QuantInput) and _reads_integers(module, block)
        for module, block in each
    )


def _reads_integers(module: QuantLinear | QuantInput, block: int) -> bool:
    return module.covered is not None or module.activations in PER_TOKEN or bool(block)


def _step(module: nn.Module, x: Tensor, block: int) -> Tensor | None:
    """Compute, for correct runs, one step of the integers of x, as a change of x (..., 1) or (...,
    in); None where x stays float.

    block: inputs per int8 block; 0: none
    """
    if not isinstance(module, QuantLinear | QuantInput) or not _reads_integers(module, block):
        return None
    scaled = x if module.factor is None else x * module.factor
    if module.covered is not None and module.activations == "float8 tensor":
        scale = torch.full_like(x[..., :1], module.covered.float8_scale)
        step = float8.spacing(scaled / scale) * scale
    elif module.covered is not None and module.activations == "float4 group":
        groups = scaled.unflatten(-1, (-1, float4.GROUP))
        scale = float4.input_scales(groups, module.covered.float4_global_scale)
        step = (float4.spacing(groups / torch.where(scale > 0, scale, 1.0)) * scale).flatten(-2)
    elif module.covered is not None:
        step = torch.full_like(x[..., :1], module.covered.scale)
    elif module.activations == "token":
        step = scaled.abs().amax(-1, keepdim=True) / 127
    elif module.activations in PER_TOKEN:
        largest = find_largest_values(scaled, module.activations)
        scale = torch.where(largest > 0, largest, torch.ones_like(largest)) / float8.LARGEST
        # the largest value is 448 in every run
        step = (float8.spacing(scaled / scale) * scale).masked_fill(scaled.abs() >= largest, 0)
    else:
        step = x.abs().amax(-1, keepdim=True) / 127
    return step if module.factor is None else step / module.factor


def _flipped(x: Tensor, step: Tensor, mask: Tensor, mode: RandomRounding, every: bool) -> Tensor:
    """Return x of a correct run with one random value moved by one step: in one real token of each
    example, or in every token where `every`.

    step: result of _step
    mask: True for real tokens
    """
    if mask.ndim < 2:  # images, whole or in windows: (image, channel, row, column), or a width last
        mask = torch.ones((len(mask), x[..., 0].numel() // len(mask)), dtype=torch.bool)
    elif x.ndim == 4 and x.shape[2] == mask.shape[1]:  # probabilities (text, head, query, key)
        mask = mask[:, None].expand(x.shape[:-1]).reshape(len(x), -1)
    elif x.shape[:-1] != mask.shape:
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
    """Quantize x, times the module's factor, as a fused kernel does, to int8 in blocks along the
    last axis, and de-quantize it.

    block: values per block
    """
    factor, width = getattr(module, "factor", None), x.shape[-1]
    if factor is not None:
        x = x * factor
    padded = nn.functional.pad(x, (0, -width % block))
    blocks = padded.reshape(*x.shape[:-1], -1, block)
    step = blocks.abs().amax(-1, keepdim=True) / 127
    step = torch.where(step > 0, step, torch.ones_like(step))
    x = ((blocks / step).round() * step).reshape(padded.shape)[..., :width]
    return x if factor is None else x / factor


def _round_parameters(model: nn.Module, mode: RandomRounding, arithmetic: Arithmetic) -> None:
    """Round, in a correct run, vectors, filters and added parameters (such as an image's positions)
    to the storage type at random, and folded parameters by their own error. Matrices are left out:
    the random errors of products include theirs."""
    for name, parameter in model.named_parameters():
        growth = arithmetic.replaced.get(name, 0.0)
        coarse = arithmetic.coarse and parameter.ndim != 2
        if not growth and not coarse:
            continue
        value = mode.moved(parameter.data, arithmetic.unit if coarse else 0.0)
        rms = parameter.data.norm() / math.sqrt(max(parameter.numel(), 1))
        parameter.data = value + growth * UNIT["fp32"] * rms * mode.noise(value)


@dataclass
class _Replay:
    store: Store
    trace: trace.Trace | None = None
    calls: dict[str, int] = field(default_factory=dict)
    inputs: list[Mapping[str, Array]] = field(default_factory=list)


class _ReplayedLinear(nn.Module):
    """Stand-in for a linear module in a correct run: it records its input, and returns the output
    that a trace of the model has."""

    def __init__(
        self, linear: nn.Module, name: str, answers: _Replay, mode: RandomRounding
    ) -> None:
        super().__init__()
        self.linear, self._name, self._answers, self._mode = linear, name, answers, mode

    @property
    def weight(self) -> Any:
        """Weight of the replaced module, for models that read it directly."""
        return self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        self._mode.pause()
        name, answers = self._name, self._answers
        one = answers.trace
        assert one is not None
        use = answers.calls[name] = answers.calls.get(name, -1) + 1
        array = x.detach().numpy().reshape(one.inputs[name, use].shape)
        answers.inputs.append(answers.store({f"{name}:input:{use}": array}))
        output = torch.from_numpy(np.ascontiguousarray(one.outputs[name, use]))
        shaped = output if output.ndim == 4 else output.reshape(*x.shape[:-1], -1)
        value = self._mode.moved(shaped, self._mode.arithmetic.unit)
        self._mode.resume()
        return value
