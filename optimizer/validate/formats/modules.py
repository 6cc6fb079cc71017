"""Judge each quantized linear module of a model that transformers runs, on its own inputs.

    model of transformers, state in torch, batches -> [JudgedPiece]

One integer that rounding moves across a tie changes a complete model's output by more than a wrong
scale of the inputs may. A module alone, with the input that transformers gives it, returns what the
state's module returns for that input, but for the rounding of its sums (pieces/roundoff.py), and
for the inputs that lie within NEAR of a tie. So a wrong scale shows at full size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from optimizer.compress import simulate
from optimizer.compress.simulate import QuantLinear
from optimizer.compress.walk.blocks import select_real_rows
from optimizer.foundation.state import PER_TOKEN
from optimizer.harness.inputs.batch import Batch
from optimizer.validate.ledger import trace
from optimizer.validate.ledger.pieces.pieces import WORST, Element, JudgedPiece, find_furthest
from optimizer.validate.ledger.pieces.roundoff import UNIT, ModuleProduct

NEAR = 8 * UNIT["fp32"]
"""Relative change of a value over its scale by rounding: of the largest value's quotient, its
stored scale, a reciprocal and the product, in either of the two programs."""


TOKEN_STEPS = 127.5
"""Steps of int8 inputs from 0 to a token's largest value in transformers; 127 in the state and in
vLLM."""


def judge(
    model: nn.Module, state: nn.Module, modules: Collection[str], batches: Sequence[Batch]
) -> list[JudgedPiece]:
    """Return a JudgedPiece for each of `modules`, judged in float32 on the inputs that it gets in
    `model`.

    model: the model that transformers loaded
    state: the compressed state in torch, in which all of `modules` are QuantLinears
    modules: names of the modules to judge
    batches: inputs of the complete model
    """
    far: dict[str, list[tuple[float, Element]]] = {name: [] for name in modules}
    references = {name: _linear(state, name) for name in modules}

    def hook(name: str, real: Tensor) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
        def judge_one(_module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            rows = select_real_rows(args[0], real), select_real_rows(output, real)
            far[name] = _worst(far[name] + _compare(references[name], *rows))

        return judge_one

    for batch in batches:
        with ExitStack() as hooks:
            for name in modules:
                receive = hook(name, torch.from_numpy(batch.real))
                hooks.callback(model.get_submodule(name).register_forward_hook(receive).remove)
            trace.run(model, batch, ())
    return [
        JudgedPiece(
            name,
            "product",
            each[0][0] if each else 0.0,
            _product(references[name]).limit,
            tuple(element for _, element in each),
        )
        for name, each in far.items()
    ]


def _linear(state: nn.Module, name: str) -> QuantLinear:
    module = state.get_submodule(name)
    assert isinstance(module, QuantLinear)
    return module


def _worst(far: list[tuple[float, Element]]) -> list[tuple[float, Element]]:
    return sorted(far, key=lambda f: -f[0])[:WORST]


def _product(linear: QuantLinear) -> ModuleProduct:
    bias = None if linear.bias is None else linear.bias.numpy()
    return ModuleProduct(linear.weight.detach().numpy(), bias, "fp32")


def _compare(linear: QuantLinear, x: Tensor, output: Tensor) -> list[tuple[float, Element]]:
    """Return (|error| / bound, element) of the elements of an output that are furthest from the
    output of `linear` on the same input.

    linear: module of the compressed state
    x: input (tokens, in)
    output: output (tokens, out) of the module in transformers
    """
    with torch.no_grad():
        scaled = x if linear.factor is None else x * linear.factor
        rounded = _rounding(linear, scaled)
        values = rounded(scaled)
        ties = _ties(linear, scaled, rounded) @ linear.weight.abs().double().T
    product = _product(linear)
    return find_furthest(values.double().numpy(), output.numpy(), product, ties.numpy())


def _rounding(linear: QuantLinear, scaled: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that quantizes and de-quantizes values as transformers does, with the
    scales that it computes for the input `scaled` (tokens, in)."""
    mode, covered = linear.activations, linear.covered
    if mode is None:
        return lambda values: values
    if mode not in PER_TOKEN:
        assert covered is not None
        return lambda values: simulate.fake_quantize(values, covered, mode)
    largest = simulate.find_largest_values(scaled, mode)
    if mode != "token":
        return lambda values: simulate.fake_quantize_by_largest_float8(values, largest)
    scale = torch.where(largest > 0, largest, torch.ones_like(largest)) / TOKEN_STEPS
    return lambda values: (values / scale).clamp(-128, 127).round() * scale


def _ties(linear: QuantLinear, scaled: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """Return by how much each quantized input may change because it lies near a rounding tie:
    (tokens, in) float64, 0 where it does not.

    scaled: input (tokens, in), times the module's factor
    rounded: result of _rounding
    """
    near = NEAR * scaled.abs()
    if linear.activations == "tensor":
        assert linear.covered is not None
        # compressed-tensors adds the zero point, in float32, before it rounds to an integer
        near = near + UNIT["fp32"] * (scaled - linear.covered.offset).abs()
    values = rounded(scaled)
    if linear.activations is None:
        return torch.zeros_like(values, dtype=torch.float64)
    changes = [(rounded(scaled + sign * near) - values).abs() for sign in (-1, 1)]
    return torch.maximum(*changes).double()
