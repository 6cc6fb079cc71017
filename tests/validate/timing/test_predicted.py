"""The predicted time of timing follows the stopping rule, and what a round reads and multiplies."""

from __future__ import annotations

from typing import Any

import pytest

from optimizer.foundation.process.machine_speed import MachineSpeed
from optimizer.recipe.schema import Latency, Validation
from optimizer.timing.stopping_rules import OPENINGS, RatioQuestion
from optimizer.validate.timing.cells import CANDIDATE
from optimizer.validate.timing.predicted import (
    SPREAD,
    EncoderSizes,
    PredictedTimes,
    Prediction,
    predict,
    predict_generation,
)
from tests.validate.runs import Run
from tests.validate.test_stage import changed

INSTANT = 1e18


def ratio(value: float, **latency: Any) -> Prediction:
    """Prediction of a cell whose float round takes a second, with openings of ten."""
    cells = [PredictedTimes({"float": 1.0, CANDIDATE: value})]
    return predict(Latency(**{"max_seconds": 600_000, "iterations": 6, **latency}), cells, 10, 1)


def test_a_clear_ratio_takes_the_first_look_alone() -> None:
    found = ratio(0.5)
    assert found.least == found.likely == OPENINGS * (10 + (1 + 2) * 1.5)
    assert found.fewest == found.openings == OPENINGS


def test_the_nearer_a_ratio_is_to_1_the_more_openings_it_takes() -> None:
    counts = [ratio(value).openings for value in (0.9, 0.97, 0.99, 0.997, 0.999)]
    assert counts == sorted(counts)
    assert counts[-1] > counts[0] == OPENINGS
    assert {ratio(1 / v).openings for v in (0.97, 0.99)} == set(counts[1:3])


def test_openings_end_where_the_next_look_would_exceed_the_time() -> None:
    assert ratio(1.0, max_seconds=0).openings == OPENINGS
    for seconds in (200, 400, 5000):
        assert (
            ratio(1.0, max_seconds=seconds).likely
            <= seconds
            < 2 * ratio(1.0, max_seconds=seconds).likely
        )


def test_without_a_gate_there_is_one_look_and_without_float_none() -> None:
    assert ratio(1.0, must_beat_float=False).openings == OPENINGS
    latency = Latency(iterations=6, must_beat_float=False, time_float=False)
    assert predict(latency, [PredictedTimes({CANDIDATE: 2.0})], 10, 1) == Prediction(24, 24, 0, 0)


def test_a_system_that_is_only_shown_takes_no_more_time_than_the_others() -> None:
    assert PredictedTimes({"float": 1.0, CANDIDATE: 0.5}, beside=0.7).round == 2.2
    assert PredictedTimes({"float": 1.0, CANDIDATE: 0.5}, beside=9.0).round == 3.0


def test_the_spread_is_that_of_two_speeds_3_percent_apart() -> None:
    assert pytest.approx(SPREAD, rel=0.02) == (1.03**0.5 - 1.03**-0.5) / 2
    assert RatioQuestion(1.0, 1).deviations(OPENINGS, 0.975) * SPREAD < 0.06


def test_an_encoder_multiplies_by_the_matrices_in_its_blocks() -> None:
    shapes = {"embeddings.weight": (1000, 8)}
    shapes |= {f"layer.{i}.{n}.weight": (8, 16) for i in range(3) for n in "ab"}
    model = EncoderSizes.of(shapes)
    assert model == EncoderSizes(linear=6 * 128, wide=6 * 24, modules=6, hidden=8, blocks=3)
    speed = MachineSpeed(INSTANT, INSTANT, INSTANT, INSTANT, INSTANT, INSTANT, threads=1)
    assert model.forward(speed, 10, 5, 128.0, 2) == pytest.approx(10 * 6 / 2)


def test_a_timed_step_reads_the_stored_weights_once_for_all_rows_of_a_batch(
    runs: dict[str, Run],
) -> None:
    speed = MachineSpeed(INSTANT, INSTANT, 1, 1e9, 1, INSTANT, threads=1)
    latency = {"batch": (1, 8), "sequence": (16, 32), "iterations": 6}
    compared, alone = 4 * OPENINGS * (1 + 2), 4 * (1 + 6)  # rounds of all cells

    def of_ten_tokens(time_float: bool, **other: Any) -> float:
        def seconds(new: int) -> float:
            settings = Latency(
                **latency, new_tokens=new, must_beat_float=False, time_float=time_float
            )
            section: Validation = changed(runs["w8"], latency=settings).section
            section = section.model_copy(update=other)
            return predict_generation(section, {"layer.0.weight": (1000, 1000)}, speed).least

        return seconds(20) - seconds(10)

    assert of_ten_tokens(True) == pytest.approx(10 * compared * (4 + 1) * 1e-3)
    assert of_ten_tokens(False) == pytest.approx(10 * alone * 1e-3)
    quantize = runs["w8"].section.quantize
    pruned = quantize.model_copy(update={"methods": ("float_weights",), "method": None})
    assert of_ten_tokens(False, quantize=pruned) == pytest.approx(10 * alone * 4e-3)
    target = runs["w8"].section.target.model_copy(update={"runtime": "compressed-tensors"})
    assert of_ten_tokens(True, target=target) == 0
