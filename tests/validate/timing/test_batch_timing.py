"""The speed gates' verdicts follow from intervals; slow candidates are explained."""

from __future__ import annotations

from typing import Any

import pytest

from optimizer.foundation.errors import OptimizeError
from optimizer.harness.inputs.text import NEUTRAL
from optimizer.recipe.schema import Latency
from optimizer.timing.stopping_rules import RatioQuestion
from optimizer.validate.gates import UNMEASURED, Gate, judge_overall
from optimizer.validate.timing import batch_timing
from optimizer.validate.timing.cells import CANDIDATE
from optimizer.validate.timing.speed_gates import BASELINE, list_unmeasured
from tests.validate.runs import Run

Interval = tuple[float | None, float | None]
ALL_FUSED = {"eligible": 36, "wider": []}


def section(*intervals: Interval, p99: Interval = (1.0, 2.0), forward: float = 0.9) -> Any:
    stages = {"pre": {"p50": 1 - forward}, "forward": {"p50": forward}, "post": {"p50": 0.0}}
    system = {"end_to_end": {"p99": 1.5, "p99_interval": list(p99)}, "stages": stages}
    return {
        "cells": [
            {
                "batch": i + 1,
                "sequence": 16,
                "systems": {CANDIDATE: system},
                "ratio": {"median": 0.9, "interval": list(interval)},
            }
            for i, interval in enumerate(intervals)
        ]
    }


def beats(*intervals: Interval, inspected: Any = ALL_FUSED, forward: float = 0.9) -> Gate:
    (gate,) = batch_timing.judge(section(*intervals, forward=forward), Latency(), inspected)
    return gate


@pytest.mark.parametrize(
    ("intervals", "verdict"),
    [
        ([(0.4, 0.6)], "pass"),
        ([(0.9, 1.1)], "inconclusive"),
        ([(1.1, 1.3)], "fail"),
        ([(0.4, 0.6), (1.1, 1.3)], "fail"),
        ([(0.4, 0.6), (0.9, 1.1)], "inconclusive"),
        ([(0.4, None)], "inconclusive"),
        ([(None, None)], "inconclusive"),
        ([(None, None), (1.1, 1.2)], "fail"),
    ],
)
def test_every_cell_must_beat_float_with_its_whole_interval(
    intervals: list[Interval], verdict: str
) -> None:
    assert beats(*intervals).verdict == verdict


def test_a_slow_candidate_with_wider_modules_names_them() -> None:
    inspected = {"eligible": 36, "wider": ["encoder.layer.3.output.dense"]}
    assert "encoder.layer.3.output.dense" in beats((1.1, 1.3), inspected=inspected).message


def test_a_slow_candidate_that_mostly_tokenizes_says_so() -> None:
    assert "10%" in beats((1.1, 1.3), forward=0.1).message


def test_size_as_the_goal_has_no_speed_gate() -> None:
    assert batch_timing.judge(section((2.0, 3.0)), Latency(must_beat_float=False), ALL_FUSED) == []


@pytest.mark.parametrize(
    ("p99", "verdict"),
    [
        ((1.0, 4.9), "pass"),
        ((5.1, 6.0), "fail"),
        ((4.0, 6.0), "inconclusive"),
        ((1.0, None), "inconclusive"),
    ],
)
def test_p99_is_judged_by_its_interval(p99: Interval, verdict: str) -> None:
    latency = Latency(must_beat_float=False, p99_ms=5.0)
    (gate,) = batch_timing.judge(section((0.4, 0.5), p99=p99), latency, ALL_FUSED)
    assert gate.verdict == verdict


def test_an_undecided_gate_says_what_would_decide_it() -> None:
    undecided = section((0.9, 1.1), (0.4, 0.5))
    undecided["cells"][0]["ratio"]["needed"] = {"rounds": 320, "seconds": 95.0}
    (gate,) = batch_timing.judge(undecided, Latency(), ALL_FUSED)
    assert "about 320 rounds" in gate.message
    assert "latency.max_seconds: 210" in gate.message  # for each of two cells, and some to spare
    undecided["cells"][0]["ratio"]["needed"] = {"rounds": 2_621_440, "seconds": 1_600_000.0}
    (gate,) = batch_timing.judge(undecided, Latency(), ALL_FUSED)
    assert "so near 1 that only 1,000 hours of timing would decide" in gate.message
    undecided["cells"][0]["ratio"] |= {"needed": None, "reckoned": 2_621_440}
    (gate,) = batch_timing.judge(undecided, Latency(), ALL_FUSED)
    assert "2,621,440 rounds would not decide" in gate.message
    assert "where nothing else runs" in gate.message


def timed(run: Run, **latency: Any) -> tuple[Any, dict[str, Gate]]:
    """The measured section and the gates of a run with this latency section."""
    m = run.materials()
    wanted = m.section.validate_.latency.model_copy(update=latency)
    inner = m.section.validate_.model_copy(update={"latency": wanted})
    m.section = m.section.model_copy(update={"validate_": inner})
    found = batch_timing.measure(m, list(NEUTRAL))
    return found, {g.name: g for g in batch_timing.judge(found, wanted, ALL_FUSED)}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_timing, "measure_peak_memory", lambda *_: {})


@pytest.mark.usefixtures("quick")
def test_a_gate_that_so_few_rounds_cannot_decide_takes_more(runs: dict[str, Run]) -> None:
    found, gates = timed(runs["w8"], p99_ms=10_000.0)
    assert [c["runs"] for c in found["cells"]] == [6]  # in three openings
    assert found["p99"]["looks"][-1]["rounds"] > 368
    assert gates["speed.p99_ms"].verdict == "pass"


@pytest.mark.usefixtures("quick")
def test_a_gate_that_runs_out_of_time_says_what_would_decide_it(
    runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RatioQuestion, "interval", lambda *_: (0.5, 1.5))
    monkeypatch.setattr(RatioQuestion, "middle", lambda *_: 0.9)  # a measured one may be 1
    found, gates = timed(runs["w8"], must_beat_float=True, max_seconds=1e-6)
    (cell,) = found["cells"]
    assert cell["runs"] == 6
    assert len(cell["ratio"]["looks"]) == 1
    gate = gates["speed.must_beat_float"]
    assert gate.verdict == "inconclusive"
    openings = cell["ratio"]["needed"]["openings"]
    assert f"about {openings} openings of both models would decide" in gate.message
    assert "latency.iterations" not in gate.message


@pytest.mark.usefixtures("quick")
def test_a_float_model_that_is_not_timed_has_no_ratio(runs: dict[str, Run]) -> None:
    found, gates = timed(runs["w8"], time_float=False, must_beat_float=False)
    (cell,) = found["cells"]
    assert set(cell["systems"]) == {batch_timing.TORCH, CANDIDATE}
    assert "ratio" not in cell
    assert not gates


def test_three_systems_are_timed_in_one_run_and_weighed(runs: dict[str, Run]) -> None:
    found = batch_timing.measure(runs["w8"].materials(), list(NEUTRAL))
    (cell,) = found["cells"]
    assert set(cell["systems"]) == {
        batch_timing.TORCH,
        BASELINE,
        CANDIDATE,
    }
    assert set(found["peak_memory"]) == set(cell["systems"])
    assert found["peak_memory"][batch_timing.TORCH] > found["peak_memory"][CANDIDATE]
    assert found["size"]["candidate_bytes"] < found["size"]["float_bytes"]


def test_a_speed_gate_that_cannot_be_measured_here_is_listed_and_does_not_pass() -> None:
    latency = Latency(must_beat_float=True, p99_ms=5.0)
    gates = list_unmeasured(latency, "no GPU")
    assert [g.name for g in gates] == ["speed.must_beat_float", "speed.p99_ms"]
    assert {g.verdict for g in gates} == {UNMEASURED}
    with pytest.raises(OptimizeError, match="no verdict"):
        judge_overall(gates)


def test_a_cell_is_called_by_the_length_that_is_timed() -> None:
    latency = Latency(batch=(1, 4), sequence=(16, 128, 512))
    assert batch_timing.list_cells(latency, 64) == [(1, 16), (1, 64), (4, 16), (4, 64)]
    assert batch_timing.list_cells(latency, 512) == [(b, s) for b in (1, 4) for s in (16, 128, 512)]
