"""Equalization keeps the function of layers, and gives both sides of a channel one range."""

from __future__ import annotations

import torch
from torch import nn

from optimizer.compress.methods.activations.equalization import (
    divide_outputs,
    find_factors,
    multiply_inputs,
)

PAIRS = [("a", ["b"]), ("b", ["c", "d"])]


def layers() -> dict[str, nn.Conv2d]:
    """A chain of convolutions, one of them by depth, whose end two read; channels of ranges that
    differ by a thousand."""
    torch.manual_seed(0)
    made = {
        "a": nn.Conv2d(3, 6, 3, padding=1),
        "b": nn.Conv2d(6, 6, 3, padding=1, groups=6),
        "c": nn.Conv2d(6, 4, 1),
        "d": nn.Conv2d(6, 4, 3, groups=2),
    }
    with torch.no_grad():
        for layer in made.values():
            layer.double().weight.mul_(
                torch.logspace(-1.5, 1.5, len(layer.weight))[:, None, None, None]
            )
    return made


def run(chain: dict[str, nn.Conv2d], x: torch.Tensor) -> list[torch.Tensor]:
    x = chain["b"](chain["a"](x).relu())
    x = nn.functional.max_pool2d(nn.functional.leaky_relu(x), 2)
    return [chain["c"](x), chain["d"](x)]


def equalize(chain: dict[str, nn.Conv2d]) -> None:
    groups = {name: layer.groups for name, layer in chain.items()}
    weights = {name: layer.weight.detach() for name, layer in chain.items()}
    factors = find_factors(PAIRS, weights, groups)
    with torch.no_grad():
        for first, readers in PAIRS:
            for parameter in chain[first].parameters():
                parameter.copy_(divide_outputs(parameter, factors[first]))
            for name in readers:
                weight = chain[name].weight
                weight.copy_(multiply_inputs(weight, factors[first], groups[name]))


def test_the_function_stays() -> None:
    chain, x = layers(), torch.randn(2, 3, 8, 8, dtype=torch.double)
    before = run(chain, x)
    equalize(chain)
    for one, other in zip(before, run(chain, x), strict=True):
        assert torch.allclose(one, other, rtol=1e-10)


def test_both_sides_of_a_channel_have_one_range_afterwards() -> None:
    chain = layers()
    equalize(chain)
    first = chain["a"].weight.abs().flatten(1).amax(1)
    second = chain["b"].weight.abs().flatten(1).amax(1)
    assert torch.allclose(first, second, rtol=0.01)


def test_a_channel_of_zeros_keeps_its_weights() -> None:
    chain = layers()
    with torch.no_grad():
        chain["a"].weight[2] = 0
    equalize(chain)
    assert all(p.isfinite().all() for layer in chain.values() for p in layer.parameters())
    assert (chain["a"].weight[2] == 0).all()
