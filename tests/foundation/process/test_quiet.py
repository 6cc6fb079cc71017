"""Libraries are silent inside `quiet`, errors are not, and everything is as before afterwards."""

from __future__ import annotations

import logging
import sys
import warnings

import pytest

from optimizer.foundation.process.quiet import quiet


def chat(name: str) -> None:
    logging.getLogger("a library").warning("%s: advice", name)
    logging.getLogger("a library").error("%s: error", name)
    warnings.warn(f"{name}: warning", stacklevel=1)
    print(f"{name}: bar", file=sys.stderr)


def test_advice_warnings_and_bars_are_suppressed_while_inside_alone(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with quiet():
            chat("inside")
        chat("after")
    assert caplog.messages == ["inside: error", "after: advice", "after: error"]
    assert [str(w.message) for w in warned] == ["after: warning"]
    assert capsys.readouterr().err == "after: bar\n"


def test_a_level_can_include_errors(caplog: pytest.LogCaptureFixture) -> None:
    with quiet(logging.ERROR):
        logging.getLogger("a library").error("inside")
    assert caplog.messages == []


def test_an_exception_is_raised_and_ends_the_silence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="wrong"), quiet():
        raise ValueError("wrong")
    print("after", file=sys.stderr)
    assert capsys.readouterr().err == "after\n"
    assert logging.root.manager.disable == logging.NOTSET
