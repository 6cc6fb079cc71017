"""Work that takes longer than predicted is reported while it runs."""

from __future__ import annotations

import time

import pytest

from optimizer.foundation.process import busy
from optimizer.foundation.progress import overdue


def test_late_work_is_reported_with_its_prediction_and_the_load(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(busy.os, "getloadavg", lambda: (99.0, 0, 0))
    with overdue("compress", predicted=0.01, patience=0.02):
        time.sleep(0.2)
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("compress: 0 s so far; predicted 0 s for a quiet machine; ")
    assert "busy, load 99.0 on" in first


def test_work_in_time_is_not_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with overdue("compress", predicted=100):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("running", "quiet"), [(0.1, True), (999.0, False)])
def test_a_quiet_machine_is_not_called_busy(
    running: float, quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(busy.os, "getloadavg", lambda: (running, 0, 0))
    assert (busy.describe() == "") == quiet
