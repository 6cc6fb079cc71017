"""Commands that the harness of a bundle runs: `optimize serve` and `python -m harness serve` have
one definition of their options."""

from __future__ import annotations

import argparse

import pytest
from click.testing import CliRunner

from optimizer.cli import main
from optimizer.harness.commands import command_line

COMMANDS = ("predict", "bench", "serve", "web")


def option_names(command: str) -> set[str]:
    actions = command_line._parser("optimize").subcommands[command]._actions
    return {o for a in actions if a.help != argparse.SUPPRESS for o in a.option_strings}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_lists_every_option_of_the_harness(command: str) -> None:
    result = CliRunner().invoke(main, [command, "--help"])
    assert result.exit_code == 0
    assert [o for o in option_names(command) if o not in result.output] == []
    assert "--bundle" not in result.output


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_has_a_help_text(command: str) -> None:
    actions = command_line._parser("optimize").subcommands[command]._actions
    assert [a.dest for a in actions if not a.help] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serve", "b", "--prt", "80"], "optimize serve: unknown option --prt. Did you mean"),
        (["predict", "b", "--batch-sise=3", "x"], "Did you mean --batch-size?"),
        (["bench", "b", "--zzz"], "`optimize bench --help` lists the options"),
        (["web", "b", "8000"], "optimize web: '8000' is one word too many"),
        (["serve", "b", "--port", "x"], "optimize serve: argument --port: 'x' was given"),
    ],
)
def test_a_wrong_option_names_the_command_that_was_typed(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words, standalone_mode=False)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_harness_of_a_bundle_names_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["serve", "--prt", "80"]) == 2
    assert "python -m harness serve: unknown option --prt" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "predict", "bench"])
def test_an_option_before_the_bundle_is_told_where_it_goes(command: str) -> None:
    result = CliRunner().invoke(main, [command, "--threads", "2", "bundle"])
    assert result.exit_code == 2
    assert f"optimize {command} BUNDLE --threads ..." in result.output
