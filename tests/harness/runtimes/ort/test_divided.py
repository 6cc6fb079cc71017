"""A batch divided by rows has the outputs of a batch divided by operators."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from optimizer.harness.bundle.engines import Workshop
from optimizer.harness.errors import BundleError
from optimizer.harness.process.niceness import give_way
from optimizer.harness.runtimes.machine import describe_machine
from optimizer.harness.runtimes.ort.divided import RUNS, DividedRuns, can_divide_rows
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.lower.ort.build import fit
from optimizer.recipe.schema import OnnxRuntimeTarget
from tests.harness import small_model

THREADS = 3
LIMIT = 60  # seconds that threads wait for each other at most


def arrays(batch: int) -> dict[str, Any]:
    ids = np.random.default_rng(batch).integers(0, 90, (batch, 5))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}


@pytest.mark.parametrize("rows", range(1, 2 * THREADS + 2))
def test_each_row_is_answered_in_its_place_whichever_way(rows: int, tmp_path: Path) -> None:
    model = small_model.model(tmp_path / "model.onnx")
    with (
        OrtRunner(model, threads=THREADS, divide=True) as divided,
        OrtRunner(model, threads=1) as together,
    ):
        wanted = together.infer(arrays(rows))["last_hidden_state"]
        for _ in range(RUNS + 1):
            values = divided.infer(arrays(rows))["last_hidden_state"]
            np.testing.assert_allclose(values, wanted, rtol=1e-5, atol=1e-6)


class Session:
    """Session that doubles its input; each part waits for all others."""

    def __init__(self, shares: int = THREADS) -> None:
        self.all_there = threading.Barrier(shares)
        self.shares: list[list[int]] = []
        self.niceness: set[int] = set()

    def run(self, _names: Sequence[str], arrays: Mapping[str, Any]) -> list[Any]:
        self.all_there.wait(LIMIT)
        if sys.platform == "linux":
            self.niceness.add(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        self.shares.append(arrays["x"].tolist())
        if 99 in arrays["x"]:
            raise ValueError("a share fails")
        return [2 * arrays["x"], -arrays["x"]]


def doubled_together(_names: Sequence[str], arrays: Mapping[str, Any]) -> list[Any]:
    return [2 * arrays["x"], -arrays["x"]]


def refuse(*_: Any) -> Any:
    raise AssertionError("it was not to be run")


def test_shares_run_at_once_and_what_is_left_over_by_all_threads() -> None:
    session, rest = Session(), list[list[int]]()

    def together(names: Sequence[str], arrays: Mapping[str, Any]) -> list[Any]:
        rest.append(arrays["x"].tolist())
        return doubled_together(names, arrays)

    runs = DividedRuns(lambda: session, together, THREADS)
    doubled, negative = runs.run(["a", "b"], {"x": np.arange(8)})
    runs.close()
    assert sorted(session.shares) == [[0, 1], [2, 3], [4, 5]]
    assert rest == [[6, 7], list(range(8))]  # and all of them, to be timed
    assert doubled.tolist() == [2 * n for n in range(8)]
    assert negative.tolist() == [-n for n in range(8)]


def test_fewer_rows_than_threads_open_no_second_session() -> None:
    runs = DividedRuns(refuse, lambda _names, arrays: [arrays["x"]], THREADS)
    assert runs.run(["a"], {"x": np.arange(2)})[0].tolist() == [0, 1]


class Timed:
    """Both ways of running, with a scripted clock."""

    def __init__(
        self, by_rows: Sequence[float], by_operators: Sequence[float], apart: float = 0
    ) -> None:
        self.now, self.apart = 0.0, apart
        self.seconds = {"rows": iter(by_rows), "operators": iter(by_operators)}
        self.ways: list[str] = []
        self.caller = threading.current_thread()
        self.runs = DividedRuns(lambda: self, self.together, 2, lambda: self.now)

    def _pass(self, way: str) -> None:
        self.ways.append(way)
        self.now += next(self.seconds[way], 1.0)

    def run(self, _names: Sequence[str], arrays: Mapping[str, Any]) -> list[Any]:
        if threading.current_thread() is self.caller:  # once a batch
            self._pass("rows")
        return [arrays["x"]]

    def together(self, _names: Sequence[str], arrays: Mapping[str, Any]) -> list[Any]:
        self._pass("operators")
        return [arrays["x"] + self.apart]

    def later(self, rows: int = 4) -> str:
        """Return the way in which a batch of this size runs after the timing."""
        for _ in range(RUNS):
            self.runs.run(["a"], {"x": np.arange(rows)})
        tried = len(self.ways)
        self.runs.run(["a"], {"x": np.arange(rows)})
        assert len(self.ways) == tried + 1
        return self.ways[-1]


@pytest.mark.parametrize(
    ("by_rows", "by_operators", "expected"),
    [
        ([9, 2, 4, 2, 2], [9, 1, 3, 1, 1], "operators"),
        ([1, 2, 2, 2, 2], [9, 1, 1, 1, 1], "operators"),  # a first run does not count
        ([9, 2, 2, 2, 2], [9, 1, 1, 1, 2], "rows"),  # not every time
        ([9, 1, 1, 1, 1], [9, 2, 2, 2, 2], "rows"),
        ([9, 1, 1, 1, 1], [0, 1, 1, 1, 1], "rows"),
    ],
)
def test_batches_run_by_rows_unless_each_by_operators_was_faster(
    by_rows: list[float], by_operators: list[float], expected: str
) -> None:
    assert Timed(by_rows, by_operators).later() == expected


def test_each_size_is_timed_for_itself() -> None:
    timed = Timed([9, 2, 2, 2, 2, 9, 1, 1, 1, 1], [9, 1, 1, 1, 1, 9, 2, 2, 2, 2])
    assert [timed.later(4), timed.later(64)] == ["operators", "rows"]
    timed.runs.run(["a"], {"x": np.arange(4)})
    assert timed.ways[-1] == "operators"


def test_one_input_has_one_answer_where_ways_give_other_bits() -> None:
    """Kernels may sum in another order for other rows: then the faster way is not taken."""
    timed = Timed([2] * RUNS, [1] * RUNS, apart=np.float32(1e-7))
    x = np.ones(4, np.float32)
    answers = [timed.runs.run(["a"], {"x": x})[0].tobytes() for _ in range(RUNS + 2)]
    assert set(answers) == {x.tobytes()}


def test_callers_at_the_same_time_have_threads_each() -> None:
    session, callers = Session(2 * THREADS), list[threading.Thread]()
    runs = DividedRuns(lambda: session, doubled_together, THREADS)
    for first in (0, 10):
        given = {"x": np.arange(first, first + THREADS)}
        callers.append(threading.Thread(target=runs.run, args=(["a"], given)))
        callers[-1].start()
    for caller in callers:
        caller.join()
    runs.close()
    assert sorted(session.shares) == [[0], [1], [2], [10], [11], [12]]


@pytest.mark.parametrize("place", range(THREADS))
def test_a_share_that_fails_fails_the_batch(place: int) -> None:
    runs = DividedRuns(Session, refuse, THREADS)
    rows = np.arange(THREADS)
    rows[place] = 99
    with pytest.raises(ValueError, match="a share fails"):
        runs.run(["a"], {"x": rows})
    runs.close()


def test_a_run_that_fails_is_told_as_any_other(tmp_path: Path) -> None:
    model = small_model.model(tmp_path / "model.onnx")
    wrong = arrays(2 * THREADS)
    wrong["input_ids"][-1] = 10**6  # no row of the table
    with (
        OrtRunner(model, threads=THREADS, divide=True) as runner,
        pytest.raises(BundleError, match="ONNX Runtime cannot run it"),
    ):
        runner.infer(wrong)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness is the whole process's")
def test_every_thread_is_as_nice_as_the_one_that_asks() -> None:
    session = Session()
    runs = DividedRuns(lambda: session, doubled_together, THREADS)

    def nicely() -> None:
        give_way(3)
        runs.run(["a"], {"x": np.arange(THREADS)})

    thread = threading.Thread(target=nicely)
    thread.start()
    thread.join()
    now = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert session.niceness == {min(now + 3, 19)}


def port(*shape: int | str | None) -> SimpleNamespace:
    return SimpleNamespace(shape=list(shape))


@pytest.mark.parametrize(
    ("inputs", "outputs", "expected"),
    [
        ([port("batch", "sequence")], [port("batch", 8)], True),
        ([port(8, 128)], [port(8, 2)], False),
        ([port("batch", 3)], [port("batch", 8), port(8)], False),
        ([port("batch", 3)], [port("rows", 8)], False),
        ([port("batch", 3), port()], [port("batch", 8)], False),
        ([port(None, 3)], [port(None, 8)], False),
    ],
)
def test_only_what_has_one_first_axis_is_divided(
    inputs: list[Any], outputs: list[Any], expected: bool
) -> None:
    session = SimpleNamespace(get_inputs=lambda: inputs, get_outputs=lambda: outputs)
    assert can_divide_rows(session) is expected


@pytest.mark.parametrize("divide", [True, False])
def test_a_recipe_can_refuse_the_second_copy_of_the_weights(divide: bool, tmp_path: Path) -> None:
    small_model.model(tmp_path / "model.onnx")
    section = OnnxRuntimeTarget(runtime="onnxruntime", divide_batches=divide)
    engine = {"runtime": "onnxruntime", "device": "cpu", "model": "model.onnx"}
    shop = Workshop(tmp_path, {"files": {}}, describe_machine(), None)
    runner = shop.open({**engine, "fit": fit(section)}, "load", THREADS)
    assert isinstance(runner, OrtRunner)
    with runner:
        assert (runner._divided is not None) is divide
