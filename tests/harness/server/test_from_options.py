"""Lines of a server's log."""

import json

import pytest

from optimizer.harness.commands.serve import say


def test_a_line_is_the_same_document_and_no_command_of_a_ci_system(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = "##vso[task.setvariable] \x7f\u202e"
    say(level="error", error=error)
    line = capsys.readouterr().err
    assert json.loads(line)["error"] == error
    assert "##vso[" not in line
    assert line.rstrip("\n").isprintable()
