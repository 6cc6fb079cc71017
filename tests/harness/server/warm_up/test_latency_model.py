"""The cost of a batch is a line in its rows for each length."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimizer.harness.server.warm_up.latency_model import (
    LatencyLine,
    LatencyModel,
    fit_line,
    measure_latency,
)


def test_a_line_is_found_again() -> None:
    line = fit_line([(rows, 0.5 + 0.25 * rows) for rows in (1, 4, 8)])
    assert (line.fixed, line.per_row) == pytest.approx((0.5, 0.25))


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(1e-4, 10)), min_size=1))
def test_a_batch_costs_no_more_than_its_rows_alone_and_no_less_than_fewer_rows(
    points: list[tuple[int, float]],
) -> None:
    line = fit_line(points)
    assert 0 < line.seconds(1) <= line.seconds(3) <= 3 * line.seconds(1) * (1 + 1e-9)


def test_a_length_between_two_lies_between_their_times() -> None:
    costs = LatencyModel((8, 16), (LatencyLine(1.0, 1.0), LatencyLine(3.0, 2.0)))
    assert [costs.seconds(n, 2) for n in (1, 8, 12, 16, 32)] == [3.0, 3.0, 5.0, 7.0, 14.0]


def test_each_shape_is_timed_three_times_and_a_slow_one_less_often() -> None:
    now, times = 0.0, Counter[tuple[int, int]]()

    def run(length: int, rows: int) -> None:
        nonlocal now
        now += 0.01 * length * (1 + rows)
        times[length, rows] += 1

    costs = measure_latency(run, [2, 40], [1, 4], clock=lambda: now)
    assert costs.seconds(2, 3) == pytest.approx(0.08)
    assert costs.seconds(40, 1) == pytest.approx(0.8)
    assert times == {(2, 1): 3, (2, 4): 3, (40, 1): 2, (40, 4): 1}
