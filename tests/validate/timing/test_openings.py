"""Runners that are timed are those of the present opening."""

from __future__ import annotations

from collections.abc import Callable

from optimizer.validate.timing.openings import Openings


class Session:
    def __init__(self, log: list[str]) -> None:
        self._log, self.number = log, len(log)
        log.append("open")

    def infer(self, _: object) -> int:
        return self.number

    def close(self) -> None:
        self._log.append("close")


def test_a_runner_is_closed_before_the_next_one_answers_in_its_place() -> None:
    log: list[str] = []
    openings = Openings({"candidate": lambda: Session(log)})
    openings.open()
    runner = openings.runner("candidate")
    assert runner.infer({}) == 0
    openings.open()
    assert runner.infer({}) == 2
    openings.close()
    assert log == ["open", "close", "open", "close"]


def test_every_system_is_opened_first_as_often_as_the_others() -> None:
    log: list[str] = []

    def opener(name: str) -> Callable[[], Session]:
        return lambda: log.append(name) or Session([])  # type: ignore[func-returns-value]

    openings = Openings({name: opener(name) for name in "abc"})
    for _ in range(6):
        openings.open()
    assert sorted(log[::3]) == [*"aabbcc"]
