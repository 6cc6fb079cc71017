"""Bounds of a method follow from its definition."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from optimizer.compress.methods.weights.autoround import (
    Block,
    BlockSamples,
    learn_rounding,
)
from optimizer.compress.methods.weights.rtn import list_scales, rtn
from optimizer.foundation.qtensor import QTensor, Scheme, to_scale_grid
from optimizer.foundation.sections.method_options import AutoroundOptions
from optimizer.recipe.compression.quantize import Quantize
from optimizer.validate.ledger.laws import state_laws
from optimizer.validate.ledger.limits.rounding_limits import (
    GRID,
    HALF_STEP,
    Rounding,
    derive_limits,
    derive_nearest,
)
from tests.conftest import heavy_tailed

CHANNEL, GROUP = Scheme(8, granularity="channel"), Scheme(4, granularity="group", group_size=32)
INT4 = {"bits": 4, "granularity": "group", "group_size": 32}
WEIGHT = heavy_tailed((64, 128), seed=1)


def quantize(**given: Any) -> Quantize:
    return Quantize.model_validate({"weights": INT4, **given})


def test_float32_division_stays_within_half_a_step_and_its_roundoff() -> None:
    for seed in range(20):
        weight = heavy_tailed((64, 512), seed)
        q = rtn(weight, CHANNEL)
        away = (weight - q.dequantize()).abs() / q.scale
        assert 0.49 < float(away.max()) <= HALF_STEP


def test_the_grid_moves_a_scale_by_no_more_than_its_share() -> None:
    scale = heavy_tailed((10_000,), 3).abs() + 1e-3
    ratio = to_scale_grid(scale) / scale
    assert float(torch.maximum(ratio, 1 / ratio).max()) <= GRID


@pytest.mark.parametrize("scheme", [CHANNEL, GROUP], ids=["channel", "group"])
def test_round_to_nearest_obeys_its_own_laws(scheme: Scheme) -> None:
    assert law(rtn(WEIGHT, scheme)) == ""


@pytest.mark.parametrize("by", [0.99, 1.01])
def test_a_scale_between_those_that_are_chosen_from_is_refused_in_every_group(by: float) -> None:
    q = rtn(WEIGHT, GROUP)
    for row in range(0, 64, 8):
        for group in range(4):
            scale = q.scale.clone()
            scale[row, group] = to_scale_grid(scale[row, group] * by)
            listed = bool((list_scales(WEIGHT, GROUP)[:, row, group] == scale[row, group]).any())
            assert not listed
            assert f"row {row} group {group}" in law(replace(q, scale=scale))


def law(q: QTensor, rounding: Rounding | None = None) -> str:
    return state_laws._weight(q, WEIGHT, rounding or derive_nearest(q.scheme.bits))


def test_eight_bits_are_not_clipped_and_fewer_are() -> None:
    assert derive_nearest(8).scale == (1.0, 1.0)
    assert derive_nearest(4).scale[0] < 1.0


def test_only_methods_that_round_to_nearest_are_held_to_half_a_step() -> None:
    assert derive_limits(quantize(), None, 4) == derive_nearest(4)
    assert not derive_limits(quantize(method="gptq"), None, 4).nearest
    assert not derive_limits(quantize(methods=("awq",)), None, 4).candidates_only


def test_a_learned_scale_of_8_bits_that_is_2_percent_off_is_refused() -> None:
    limits = derive_limits(quantize(method="autoround", autoround={"steps": 200}), None, 8)
    q = rtn(WEIGHT, CHANNEL)
    assert law(q, limits) == ""
    for by in (0.98, 1.02):
        scale = q.scale.clone()
        scale[5] = to_scale_grid(scale[5] * by)
        assert "row 5" in law(replace(q, scale=scale), limits)


def test_what_is_learned_may_move_as_far_as_its_steps_add_up_to() -> None:
    def moved(steps: int) -> Rounding:
        return derive_limits(quantize(method="autoround", autoround={"steps": steps}), None, 4)

    short, long = moved(50), moved(200)
    assert short.learned
    assert 0 < short.norms < long.norms
    assert short.scale[0] > long.scale[0]
    assert short.scale[1] < long.scale[1]


def test_integers_that_start_as_the_nearest_move_by_what_the_steps_add_up_to() -> None:
    def steps(*methods: str) -> float:
        return derive_limits(quantize(methods=methods, autoround={"steps": 200}), None, 4).steps

    assert steps("autoround") == pytest.approx(0.25 + 0.5025 + 0.5, abs=0.01)
    assert steps("gptq", "autoround") == math.inf


@pytest.mark.parametrize(
    "scheme",
    [
        CHANNEL,
        GROUP,
        replace(GROUP, symmetric=False),
        replace(GROUP, full_range=True),
    ],
    ids=str,
)
def test_learning_what_has_nothing_to_do_with_a_weight_keeps_to_the_limit(scheme: Scheme) -> None:
    """Every step pushes the same way; a row of other signs lies beyond."""
    steps = 20
    layer = nn.Linear(128, 64, bias=False)
    layer.weight = nn.Parameter(WEIGHT.clone())
    x = heavy_tailed((4, 16, 128), 7)
    target = x @ heavy_tailed((128, 64), 8) * 10
    data = BlockSamples([x], [target], [torch.ones(4, 16, dtype=torch.bool)])
    block = Block(lambda _i, x: layer(x), {"layer": layer}, {"layer": WEIGHT}, {})
    options = AutoroundOptions(steps=steps)
    start = rtn(WEIGHT, scheme)
    learned = learn_rounding(block, {"layer": start}, data, options, dtype=torch.float32).weights[
        "layer"
    ]
    assert (learned.integers != start.integers).float().mean() > 0.3

    limits = derive_limits(
        quantize(method="autoround", autoround={"steps": steps}), None, scheme.bits
    )
    assert law(learned, limits) == ""
    zero = 0 if learned.zero_point is None else learned.zero_point[3:4].repeat_interleave(32, 1)
    other = learned.integers.clone()
    other[3] = (2 * zero - other[3:4].int()).clamp(scheme.low, scheme.high)[0].to(torch.int8)
    assert "row 3" in law(replace(learned, integers=other), limits)


@pytest.mark.parametrize("text", ["samples", "generated"])
def test_scales_may_move_further_where_more_text_tunes_them(text: str) -> None:
    few, more = (
        derive_limits(quantize(methods=("gptq", "scale_tuning"), scale_tuning={text: n}), None, 4)
        for n in (10, 200)
    )
    assert more.scale[0] < few.scale[0] < few.scale[1] < more.scale[1]
    assert few.norms < more.norms
