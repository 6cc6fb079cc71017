"""Choosing under limits, held against trying everything; sizes, against the files themselves."""

from __future__ import annotations

import itertools
import random

import onnx_ir as ir
import pytest
import torch

from optimizer.compress.methods.precision.mixed_precision import (
    Option,
    choose,
    compute_stored_sizes,
    sum_choices,
)
from optimizer.compress.methods.weights.rtn import rtn
from optimizer.foundation import state
from optimizer.foundation.qtensor import QTensor, Scheme
from optimizer.lower.onnx.qdq import Surgeon, add_weight

Menus = dict[str, list[Option]]
SCHEMES = [
    Scheme(8),
    Scheme(8, symmetric=False),
    Scheme(8, granularity="tensor"),
    Scheme(4, granularity="group", group_size=16),
    Scheme(4, granularity="group", group_size=32),
    Scheme(4, symmetric=False, granularity="group", group_size=16),
]


def menus(seed: int, files: int = 1, count: int = 5) -> Menus:
    """Random menus whose larger options mostly cost less, as bits do."""
    r = random.Random(seed)
    made = {}
    for i in range(count):
        weight = r.uniform(0.1, 10)
        sizes = sorted(r.randint(1, 40) for _ in range(r.randint(1, 4)))
        made[f"m{i}"] = [
            Option(
                weight * r.uniform(0.5, 1.5) / size,
                tuple(size + r.randint(0, 3) for _ in range(files)),
            )
            for size in sizes
        ]
    return made


def possible(m: Menus, limits: tuple[int, ...]) -> list[float]:
    """The cost of every choice within the limits."""
    found = []
    for picks in itertools.product(*(range(len(menu)) for menu in m.values())):
        cost, sizes = sum_choices(m, dict(zip(m, picks, strict=True)))
        if all(s <= limit for s, limit in zip(sizes, limits, strict=True)):
            found.append(cost)
    return found


@pytest.mark.parametrize("seed", range(30))
def test_no_file_exceeds_its_limit(seed: int) -> None:
    m, limits = menus(seed, files=2), (90, 95)
    if possible(m, limits):
        assert all(
            s <= x for s, x in zip(sum_choices(m, choose(m, limits))[1], limits, strict=True)
        )


@pytest.mark.parametrize("seed", range(30))
def test_the_cost_is_within_one_step_of_the_least_possible(seed: int) -> None:
    m, limits = menus(seed), (80,)
    best = possible(m, limits)
    if best:
        widest = max(menu[0].cost - min(o.cost for o in menu) for menu in m.values())
        assert min(best) <= sum_choices(m, choose(m, limits))[0] <= min(best) + max(widest, 0)


@pytest.mark.parametrize("seed", range(10))
def test_more_room_never_costs_more(seed: int) -> None:
    m = menus(seed, files=2)
    least = [sum(max(o.sizes[f] for o in menu) for menu in m.values()) for f in (0, 1)]
    costs = [
        sum_choices(m, choose(m, (least[0] + room, least[1] + room)))[0] for room in range(0, 60, 4)
    ]
    assert costs == sorted(costs, reverse=True)


def test_with_room_for_all_every_module_gets_its_best() -> None:
    m = menus(3)
    chosen = choose(m, (10**6,))
    assert all(menu[chosen[n]].cost == min(o.cost for o in menu) for n, menu in m.items())


def test_room_goes_where_a_byte_saves_most() -> None:
    same = [Option(1.0, (10,)), Option(0.0, (20,))]
    m = {"dull": same, "sharp": [Option(5.0, (10,)), Option(0.0, (20,))]}
    assert choose(m, (30,)) == {"dull": 0, "sharp": 1}


def test_limits_that_nothing_fits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"take \[20\]"):
        choose({"a": [Option(1.0, (20,))]}, (19,))


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_sizes_are_those_of_the_state_and_of_the_graphs(scheme: Scheme) -> None:
    q = rtn(torch.randn(48, 64, generator=torch.Generator().manual_seed(1)), scheme)
    held = sum(t.numel() * t.element_size() for t in state.tensors_of("w", q).values())
    assert compute_stored_sizes(scheme, 48, 64) == (held, graph_bytes(q))


def test_three_bits_are_stored_as_four() -> None:
    three, four = (Scheme(b, granularity="group", group_size=16) for b in (3, 4))
    q = rtn(torch.randn(48, 64), three)
    held = sum(t.numel() * t.element_size() for t in state.tensors_of("w", q).values())
    assert compute_stored_sizes(three, 48, 64) == compute_stored_sizes(four, 48, 64)
    assert compute_stored_sizes(three, 48, 64)[0] == held


def graph_bytes(q: QTensor) -> int:
    """Bytes of the initializers of a weight in an ONNX graph in fp16."""
    x = ir.val("x", ir.DataType.FLOAT16, ["n", 64])
    graph = ir.Graph([x], [x], nodes=[], opset_imports={"": 21})
    surgeon = Surgeon(ir.Model(graph, ir_version=10), "float16", {"w": q})
    codes, scale, zero, _ = add_weight(surgeon, "w", q)
    parts = [v.const_value for v in (codes, scale, zero) if v is not None]
    return sum(t.nbytes for t in parts if t is not None)
