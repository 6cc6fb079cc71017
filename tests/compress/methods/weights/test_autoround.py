"""Learned rounding of one block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optimizer.compress.methods.weights import autoround
from optimizer.compress.methods.weights.autoround import (
    BlockSamples,
    StepSizes,
    learn_rounding,
)
from optimizer.compress.methods.weights.rtn import rtn
from optimizer.compress.methods.weights.tuned import Tuned
from optimizer.foundation.qtensor import QTensor, Scheme
from optimizer.foundation.sections.method_options import AutoroundOptions
from tests.conftest import heavy_tailed

WIDTH = 64
SCHEMES = [
    Scheme(4, granularity="group", group_size=16),
    Scheme(4, symmetric=False, granularity="group", group_size=16),
    Scheme(4, granularity="group", group_size=16, full_range=True),
    Scheme(3, granularity="group", group_size=32),
    Scheme(4),
    Scheme(8),
    Scheme(8, symmetric=False, granularity="tensor"),
]


class Block(nn.Module):
    """A gain, two linears and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(WIDTH, generator=torch.Generator().manual_seed(5)) + 1)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.up.weight = nn.Parameter(heavy_tailed((2 * WIDTH, WIDTH), seed=1))
        self.down.weight = nn.Parameter(heavy_tailed((WIDTH, 2 * WIDTH), seed=2))
        nn.init.zeros_(self.down.bias)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.down(nn.functional.silu(self.up(x * self.gain)))
        return made


def samples(block: Block, batches: int = 8, seed: int = 0) -> BlockSamples:
    """Inputs of unequal size and correlated, as a model's are; nothing is padding."""
    generator = torch.Generator().manual_seed(seed)
    mix = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(3)) / WIDTH**0.5
    hidden = [torch.randn(2, 16, WIDTH, generator=generator) @ mix for _ in range(batches)]
    with torch.no_grad():
        target = [block(x) for x in hidden]
    return BlockSamples(hidden, target, [torch.ones(2, 16, dtype=torch.bool)] * batches)


def learn(
    block: Block,
    scheme: Scheme,
    data: BlockSamples,
    *,
    steps: int = 120,
    norm_weights: bool = False,
    **how: Any,
) -> Tuned:
    seed: Any = how.pop("seed", 0)
    return learn_rounding(
        view(block, norm_weights),
        start_of(block, scheme),
        data,
        AutoroundOptions(seed=seed).model_copy(update={"steps": steps}),  # 0 too
        dtype=torch.float32,
        **how,
    )


def view(block: Block, norm_weights: bool = False) -> autoround.Block:
    linears = {"up": block.up, "down": block.down}
    weights = {name: linear.weight.detach() for name, linear in linears.items()}
    return autoround.Block(
        lambda _i, x: block(x), linears, weights, {"gain": block.gain} if norm_weights else {}
    )


def start_of(block: Block, scheme: Scheme) -> dict[str, QTensor]:
    return {n: rtn(getattr(block, n).weight.detach(), scheme) for n in ("up", "down")}


def off(block: Block, weights: dict[str, QTensor], data: BlockSamples) -> float:
    """Squared error of the block's output with other weights, over the target's energy."""
    copy = Block()
    copy.up.weight = nn.Parameter(weights["up"].dequantize())
    copy.down.weight = nn.Parameter(weights["down"].dequantize())
    with torch.no_grad():
        error = sum(
            float((copy(x) - y).square().sum())
            for x, y in zip(data.hidden, data.target, strict=True)
        )
    return error / sum(float(y.square().sum()) for y in data.target)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_loss_falls_under_every_scheme(scheme: Scheme) -> None:
    block = Block()
    learned = learn(block, scheme, samples(block))
    assert learned.after < 0.9 * learned.before


def test_the_loss_reported_is_that_of_the_weights_returned() -> None:
    block = Block()
    data = samples(block)
    learned = learn(block, SCHEMES[0], data)
    assert off(block, learned.weights, data) == pytest.approx(learned.after, rel=1e-4)


def test_it_also_helps_on_inputs_it_was_not_given() -> None:
    block, scheme = Block(), SCHEMES[0]
    fresh = samples(block, seed=9)
    nearest = {n: rtn(getattr(block, n).weight.detach(), scheme) for n in ("up", "down")}
    learned = learn(block, scheme, samples(block, batches=32), steps=160)
    assert off(block, learned.weights, fresh) < 0.8 * off(block, nearest, fresh)


def test_steps_that_only_do_harm_leave_the_start() -> None:
    block = Block()
    learned = learn(
        block, SCHEMES[0], samples(block), steps=4, rates=StepSizes(integers=3.0, scales=1.0)
    )
    assert learned.after == learned.before
    assert torch.equal(
        learned.weights["up"].integers, rtn(block.up.weight.detach(), SCHEMES[0]).integers
    )


def test_no_steps_leave_the_start() -> None:
    block = Block()
    learned = learn(block, SCHEMES[0], samples(block), steps=0)
    assert torch.equal(
        learned.weights["down"].scale, rtn(block.down.weight.detach(), SCHEMES[0]).scale
    )


def test_the_same_seed_gives_the_same_codes_and_another_does_not() -> None:
    block = Block()
    data = samples(block)
    one, two, other = (learn(block, SCHEMES[0], data, steps=20, seed=s) for s in (1, 1, 2))
    assert torch.equal(one.weights["up"].integers, two.weights["up"].integers)
    assert not torch.equal(one.weights["up"].integers, other.weights["up"].integers)


def test_the_block_holds_its_own_weights_and_gains_afterwards() -> None:
    block = Block()
    kept = {n: p.detach().clone() for n, p in block.state_dict().items()}
    learned = learn(block, SCHEMES[0], samples(block), norm_weights=True)
    assert not torch.equal(learned.norm_weights["gain"], kept["gain"])
    assert all(torch.equal(v, kept[n]) for n, v in block.state_dict().items())


def test_padding_has_no_say() -> None:
    block = Block()
    data = samples(block)
    real = torch.ones(2, 16, dtype=torch.bool)
    real[:, 10:] = False
    masked = replace(data, real=[real] * len(data.hidden))
    noisy = [torch.where(real[..., None], x, 100.0) for x in data.hidden]
    one = learn(block, SCHEMES[0], masked, steps=20)
    two = learn(block, SCHEMES[0], replace(masked, hidden=noisy), steps=20)
    assert torch.equal(one.weights["up"].integers, two.weights["up"].integers)


def test_half_precision_products_learn_nearly_as_much() -> None:
    block = Block()
    data = samples(block)
    fine = learn(block, SCHEMES[0], data)
    start = start_of(block, SCHEMES[0])
    coarse = learn_rounding(view(block), start, data, AutoroundOptions(steps=120))
    gain = off(block, coarse.weights, data) - fine.after
    assert gain < 0.2 * (fine.before - fine.after)


def test_a_start_for_other_modules_is_refused() -> None:
    block = Block()
    with pytest.raises(ValueError, match="must name"):
        learn_rounding(view(block), {}, samples(block), AutoroundOptions(steps=1))


def test_a_target_that_is_not_finite_is_refused() -> None:
    block = Block()
    data = samples(block)
    data.target[0][0, 0, 0] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        learn(block, SCHEMES[0], data, steps=1)


class Convolved(nn.Module):
    """A depthwise convolution and one of one place, as an inverted residual has them."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.project = nn.Conv2d(8, 6, 1)
        for i, parameter in enumerate(self.parameters()):
            parameter.data = heavy_tailed(tuple(parameter.shape), 30 + i, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.project(nn.functional.relu6(self.depthwise(x)))
        return made


def test_a_convolution_learns_as_the_matrix_of_its_filters() -> None:
    block = Convolved()
    kept = {n: p.detach().clone() for n, p in block.state_dict().items()}
    hidden = [heavy_tailed((2, 8, 6, 5), 40 + i) for i in range(8)]
    with torch.no_grad():
        data = BlockSamples(hidden, [block(x) for x in hidden])
    modules = {"depthwise": block.depthwise, "project": block.project}
    weights = {name: module.weight.detach().flatten(1) for name, module in modules.items()}
    start = {name: rtn(weight, Scheme(4)) for name, weight in weights.items()}
    view = autoround.Block(lambda _i, x: block(x), modules, weights, {})
    learned = learn_rounding(view, start, data, AutoroundOptions(steps=80), dtype=torch.float32)
    assert learned.after < 0.8 * learned.before
    assert all(torch.equal(v, kept[n]) for n, v in block.state_dict().items())
    with torch.no_grad():
        for name, module in modules.items():
            module.weight.copy_(learned.weights[name].dequantize().reshape(module.weight.shape))
        error = sum(
            float((block(x) - y).square().sum()) for x, y in zip(hidden, data.target, strict=True)
        )
    energy = sum(float(y.square().sum()) for y in data.target)
    assert error / energy == pytest.approx(learned.after, rel=1e-3)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_a_scale_moves_what_the_largest_integer_stands_for_no_further_than_in_4_bits(
    bits: int,
) -> None:
    rates, highest = StepSizes(), 2 ** (bits - 1) - 1
    assert rates.scale_rate(highest) * highest <= rates.scales * 7 * (1 + 1e-12)
    assert rates.scale_rate(7) == rates.scales
