"""The replies of a run become figures and a verdict."""

from __future__ import annotations

import random
from typing import Any

import pytest

from optimizer.load_test import figures
from optimizer.load_test.open_loop import Reply

SECONDS, LIMITS = 40.0, {"latency": 50.0}


def outcomes(count: int = 4000, slow: float = 0.0) -> list[Reply]:
    """Answered after 1 to 20 ms; those in one fortieth of the time `slow` seconds later."""
    chance, of_run = random.Random(0), []
    for i in range(count):
        due = i * SECONDS / count
        ended = due + 0.001 + 0.019 * chance.random() + (slow if 8.0 <= due < 9.0 else 0.0)
        of_run.append(Reply(due, due + 0.0002, [ended], ended, 200, "yes"))
    return of_run


def judged(made: list[Reply], refusals: float = 0.0, **expected: str) -> tuple[Any, Any]:
    answers = [expected.get("answer", "yes")] * len(made)
    run = figures.summarize_run(made, answers, SECONDS, LIMITS)
    return run, figures.judge_figures(run, LIMITS, refusals)


def test_fast_answers_pass_and_their_percentiles_lie_in_their_intervals() -> None:
    run, verdict = judged(outcomes())
    assert verdict == "pass"
    for name in ("p50", "p90", "p99", "p99.9"):
        value, low, high = run["latency"][name]
        assert low <= value <= high
    assert run["answered"] == run["sent"] == 4000
    assert run["goodput"] == run["throughput"] == pytest.approx(100, rel=0.01)
    assert run["client_late_ms"] == pytest.approx(0.2)


def test_a_single_slow_second_decides_nothing_where_independent_times_would() -> None:
    """All of its requests are slow together: 2.5 % of the requests, and one window of twenty."""
    _, verdict = judged(outcomes(slow=0.2))
    assert verdict == "inconclusive"


@pytest.mark.parametrize("what", ["wrong", "lost", "refused"])
def test_one_request_without_its_answer_fails(what: str) -> None:
    made = outcomes()
    made[7].answer = "no" if what == "wrong" else made[7].answer
    made[7].status = {"wrong": 200, "lost": 500, "refused": 503}[what]
    run, verdict = judged(made)
    assert (run[what], run["answered"], verdict) == (1, 3999, "fail")


def test_so_many_may_be_refused_as_is_said() -> None:
    made = outcomes()
    for outcome in made[:40]:
        outcome.status = 429
    run, verdict = judged(made, refusals=0.01)
    assert (run["refused"], verdict) == (40, "pass")
    assert run["refused_in"]["p50"][0] < 20
    assert judged(made, refusals=0.0099)[1] == "fail"


def test_a_wait_longer_than_a_window_has_no_interval_and_fails_beyond_the_limit() -> None:
    run, verdict = judged(outcomes(slow=SECONDS / figures.WINDOWS))
    assert run["latency"]["p99"][1:] == [None, None]
    assert verdict == "fail"


def test_too_few_requests_decide_nothing() -> None:
    assert judged(outcomes(count=100))[1] == "inconclusive"


def test_pieces_are_timed_from_when_the_request_was_due_and_from_each_other() -> None:
    outcome = Reply(1.0, 1.5, [2.0, 2.1, 2.4], 2.4, 200, "abc")
    assert figures.list_times(outcome, "latency") == pytest.approx([1400])
    assert figures.list_times(outcome, "first_token") == pytest.approx([1000])
    assert figures.list_times(outcome, "between") == pytest.approx([100, 300])
    run = figures.summarize_run([outcome], ["abc"], SECONDS, {"between": 200.0})
    assert (run["answered"], run["goodput"]) == (1, 0)
