"""What a method may do follows from how it is defined."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from optimizer.compress.methods.rtn import candidates, rtn
from optimizer.qtensor import QTensor, Scheme, to_scale_grid
from optimizer.recipe.quantize import Quantize
from optimizer.validate.ledger import state_laws
from optimizer.validate.ledger.rounding_limits import GRID, HALF_STEP, Rounding, alone, of
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
            listed = bool((candidates(WEIGHT, GROUP)[:, row, group] == scale[row, group]).any())
            assert not listed
            assert f"row {row} group {group}" in law(replace(q, scale=scale))


def law(q: QTensor) -> str:
    return state_laws._weight(q, WEIGHT, alone(q.scheme.bits))


def test_eight_bits_are_not_clipped_and_fewer_are() -> None:
    assert alone(8).scale == (1.0, 1.0)
    assert alone(4).scale[0] < 1.0


def test_only_methods_that_round_to_nearest_are_held_to_half_a_step() -> None:
    assert of(quantize(), None, 4) == alone(4)
    assert not of(quantize(method="gptq"), None, 4).nearest
    assert not of(quantize(methods=("awq",)), None, 4).listed


def test_what_is_learned_may_move_as_far_as_its_steps_add_up_to() -> None:
    def moved(steps: int) -> Rounding:
        return of(quantize(method="autoround", autoround={"steps": steps}), None, 4)

    short, long = moved(50), moved(200)
    assert short.learned
    assert 0 < short.norms < long.norms
    assert short.scale[0] > long.scale[0]
    assert short.scale[1] < long.scale[1]
