"""Progress lines in a log."""

from __future__ import annotations

import re

import pytest

from optimizer.foundation.progress import bar, meter


def lines(capsys: pytest.CaptureFixture[str]) -> list[tuple[int, int]]:
    """(per cent, seconds left) of each; the last line has none left."""
    said = capsys.readouterr().err
    found = re.findall(r"(-?\d+) % \(-?\d+ s(?:, about (-?\d+) s left)?\)", said)
    return [(int(a), int(b or 0)) for a, b in found]


def test_a_line_of_a_bar_says_how_long_the_others_will_take(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(range(0, 1000, 3))  # the bar reads the clock at its start and for each line
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    assert list(bar(range(4), "x")) == [0, 1, 2, 3]
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "x: 1/4 (3 s, about 9 s left)"
    assert said[-1] == "x: 4/4 (12 s)"


def test_a_log_has_a_line_for_every_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    with meter("x", 40) as tell:
        for done in range(1, 41):
            tell(done)
    assert [percent for percent, _ in lines(capsys)] == [*range(10, 101, 10)]


def test_a_total_that_grows_is_not_passed(capsys: pytest.CaptureFixture[str]) -> None:
    """As where a machine that was busy became free, so that the time suffices for more steps."""
    with meter("x", 20) as tell:
        for done in range(1, 201):
            tell(done, 20 if done < 10 else 200)
    said = lines(capsys)
    assert [percent for percent, _ in said] == [10, 20, 30, 40, *range(10, 101, 10)]
    assert all(left >= 0 for _, left in said)


def test_what_was_done_before_is_no_measure_of_what_is_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """90 of 100 in no time, and then a second for each."""
    now = iter(range(1000))
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    with meter("x", 100, before=80) as tell:
        for done in range(81, 101):
            tell(done)
    (first, left), (last, _) = lines(capsys)
    assert (first, last) == (90, 100)
    assert left <= 10
