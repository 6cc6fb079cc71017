"""Timing: what is counted, in which order, and how far the percentiles can be trusted."""

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from optimizer.harness.bounds import fewest
from optimizer.harness.bundle import bench
from optimizer.harness.bundle.bench import System, percentile, percentile_interval
from optimizer.harness.errors import HarnessError, InputError
from tests import measured_once


class Recorder:
    """System that records its calls."""

    def __init__(self, name: str, log: list[tuple[Any, ...]]) -> None:
        self.name, self.log = name, log

    def system(self) -> System:
        return System(self.pre, lambda arrays: arrays, lambda outputs, arrays: outputs)

    def pre(self, texts: Sequence[str], length: int) -> list[str]:
        self.log.append((self.name, tuple(texts), length))
        return list(texts)


def run(**options: Any) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    log: list[tuple[Any, ...]] = []
    names = ("candidate", "onnxruntime-float", "torch-float")
    systems = {n: Recorder(n, log).system() for n in names}
    made = bench.measure(systems, [(2, 8)], ["one two three", "four"], **options)
    return made, log


def test_more_rounds_follow_as_long_as_they_are_asked_for() -> None:
    seen: list[int] = []

    def more(times: Mapping[str, Sequence[float]]) -> int:
        seen.append(len(times["a"]))
        return (4, 2, 0)[len(seen) - 1]

    system = bench.System(lambda t, _: t, lambda a: a, lambda o, _: o)
    made = bench.measure({"a": system}, [(1, 2)], ["x"], iterations=3, warmup=2, more=more)
    assert seen == [3, 7, 9]
    assert made["cells"][0]["runs"] == 9
    assert len(made["cells"][0]["systems"]["a"]["end_to_end"]["samples"]) == 9


@pytest.mark.parametrize("percent", [5, 50, 90, 99])
@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.999])
def test_the_fewest_samples_bound_a_percentile_on_both_sides(
    percent: float, confidence: float
) -> None:
    enough = fewest(percent, confidence)
    assert None not in bench.percentile_interval(range(enough), percent, confidence)
    assert None in bench.percentile_interval(range(enough - 1), percent, confidence)


def test_of_two_systems_each_comes_first_as_often() -> None:
    names = ["a", "b", "c"]
    orders = [bench.order_systems(names, i) for i in range(6)]
    for one, other in (("a", "b"), ("a", "c"), ("b", "c")):
        for pair in (orders[:2], orders[2:4], orders[4:]):
            assert sum(order.index(one) < order.index(other) for order in pair) == 1
    assert sorted(order[0] for order in orders) == [*"aabbcc"]


def test_each_round_asks_every_system_the_same_once_in_a_rotating_order() -> None:
    _, log = run(iterations=6, warmup=0)
    rounds = [log[i : i + 3] for i in range(0, len(log), 3)]
    assert all(len({(t, n) for _, t, n in r}) == 1 for r in rounds)
    assert all(len({name for name, *_ in r}) == 3 for r in rounds)
    assert [sum(r[0][0] == name for r in rounds) for name in ("candidate", "torch-float")] == [2, 2]


def test_warm_up_rounds_run_and_do_not_count() -> None:
    made, log = run(iterations=7, warmup=4)
    assert len(log) == 3 * (7 + 4)
    for system in made["cells"][0]["systems"].values():
        assert len(system["end_to_end"]["samples"]) == 7


def test_systems_that_are_opened_again_warm_up_again() -> None:
    log = list[str]()
    recorded = System(
        lambda texts, _: texts, lambda _: log.append("run"), lambda outputs, _: outputs
    )
    again = bench.Again(3, lambda: log.append("open"))
    made = bench.measure(
        {"candidate": recorded}, [(1, 4)], ["a"], iterations=7, warmup=2, again=again
    )
    assert log == [*["run"] * 5, "open", *["run"] * 5, "open", *["run"] * 3]
    (cell,) = made["cells"]
    assert cell["runs"] == 7


def test_rows_have_the_words_that_fill_the_sequence() -> None:
    _, log = run(iterations=1, warmup=0)
    _, texts, length = log[0]
    assert length == 8
    assert len(texts) == 2
    assert all(len(text.split()) >= 8 for text in texts)


def test_the_ratio_of_a_system_that_sleeps_longer_is_above_one() -> None:
    import time

    def sleeper(seconds: float) -> System:
        return System(lambda t, n: t, lambda a: time.sleep(seconds), lambda o, a: o)

    systems = {"candidate": sleeper(0.004), "onnxruntime-float": sleeper(0.001)}
    made = bench.measure(systems, [(1, 2)], ["a"], iterations=12, warmup=1)
    assert made["cells"][0]["ratio"]["median"] > 1


@pytest.mark.parametrize("missing", ["systems", "cells", "texts"])
def test_nothing_to_measure_is_an_error(missing: str) -> None:
    given: dict[str, Any] = {
        "systems": {"a": Recorder("a", []).system()},
        "cells": [(1, 2)],
        "texts": ["a"],
    }
    given[missing] = type(given[missing])()
    with pytest.raises(InputError, match=missing):
        bench.measure(**given)


@pytest.mark.parametrize("percent", [0, 50, 90, 99, 100])
def test_percentiles_are_numpys(percent: int) -> None:
    samples = np.random.default_rng(percent).lognormal(size=37)
    assert percentile(list(samples), percent) == pytest.approx(np.percentile(samples, percent))


@pytest.mark.parametrize(("percent", "runs"), [(50, 40), (90, 60), (99, 400)])
def test_an_interval_holds_the_true_percentile_as_often_as_it_says(percent: int, runs: int) -> None:
    rng = random.Random(percent)
    times = 1500
    held = 0
    for _ in range(times):
        low, high = percentile_interval([rng.random() for _ in range(runs)], percent)
        held += (low is None or low <= percent / 100) and (high is None or percent / 100 <= high)
    assert stats.binomtest(held, times, 0.95, alternative="less").pvalue > 1e-3


def test_an_end_that_too_few_runs_cannot_bound_is_unknown() -> None:
    assert percentile_interval(list(range(367)), 99)[1] is None
    assert percentile_interval(list(range(368)), 99)[1] == 367
    assert percentile_interval([1.0] * 5, 50) == (None, None)


def test_peak_memory_is_the_childs_own() -> None:
    ballast = bytearray(200 << 20)  # must not be charged to the child
    small = bench.read_peak("pass")
    large = bench.read_peak("x = bytearray(100 << 20)")
    assert small < 150 << 20
    assert large - small > 90 << 20
    assert len(ballast)


def test_a_measured_process_that_fails_says_why() -> None:
    with pytest.raises(HarnessError, match="ZeroDivisionError"):
        bench.read_peak("1 / 0")


def test_a_system_that_is_only_shown_takes_no_more_time_than_the_others() -> None:
    counted = bench.RoundPlan(40, 5, None, {"shown"})

    def times(**spent: list[float]) -> dict[str, dict[str, list[float]]]:
        return {n: {"pre": ms, "forward": ms, "post": ms} for n, ms in spent.items()}

    few, enough = fewest(50) - 1, bench.fewest(50)
    assert not counted.sits_out("shown", times(shown=[9.0] * few, a=[1.0] * few, b=[1.0] * few))
    more = times(shown=[9.0] * enough, a=[1.0] * enough, b=[1.0] * enough)
    assert counted.sits_out("shown", more)
    assert not counted.sits_out("a", more)
    caught_up = times(shown=[9.0] * enough, a=[1.0] * 9 * enough, b=[1.0])
    assert not counted.sits_out("shown", caught_up)


def test_systems_of_fewer_rounds_have_percentiles_of_their_own() -> None:
    made, log = run(iterations=8, warmup=1, beside={"torch-float"})
    timed = made["cells"][0]["systems"]
    assert made["cells"][0]["runs"] == len(timed["candidate"]["end_to_end"]["samples"]) == 8
    assert len(timed["torch-float"]["end_to_end"]["samples"]) >= fewest(50)
    assert sum(name == "candidate" for name, *_ in log) == 9


SHAPES = {"x": ((1, 2), "int64")}


def test_tests_measure_equal_programs_once_and_larger_models_anew(tmp_path: Path) -> None:
    small, keys = measured_once.SMALL, []
    in_torch: dict[str, list[str]] = {"a": [], "b": []}
    for name, size in (("one", 5), ("same", small), ("large", small + 1), ("larger", small + 2)):
        (tmp_path / name).mkdir()
        with (tmp_path / name / "model.onnx").open("wb") as file:
            file.truncate(size)
        keys.append(measured_once.key(f"open('{tmp_path / name}/model.onnx')"))
        for task in ("a", "b"):
            code = f"load_torch_model('{tmp_path / name}', '{task}')\ninputs = {SHAPES}"
            in_torch[task].append(measured_once.key(code))
            assert measured_once.key(code.replace("'x'", "'pixels'")) != in_torch[task][-1]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3
    assert len({*in_torch["a"][:2], *in_torch["b"][:2]}) == 1
    assert len({*in_torch["a"], *in_torch["b"]}) == 5
