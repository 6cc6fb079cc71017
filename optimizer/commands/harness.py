"""Pass a command on to the harness of a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import click


class HarnessCommand(click.Command):
    """Command of `optimize` on a BUNDLE whose options the harness defines: any option is passed on,
    and the help lists those of the harness."""

    def __init__(self, *args: object, **options: object) -> None:
        passed = {"ignore_unknown_options": True, "allow_extra_args": True}
        super().__init__(*args, **{**options, "context_settings": passed})  # type: ignore[arg-type]

    def format_options(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        from optimizer.harness.commands.command_line import describe_options

        formatter.write("\n" + describe_options(str(self.name)))


def harness(command: str, bundle: Path, arguments: tuple[str, ...], as_json: bool) -> NoReturn:
    """Run a command of `optimize` that the harness has, such as `serve`. Raises SystemExit with the
    command's exit code."""
    from optimizer.harness.commands.command_line import main

    if str(bundle).startswith("-"):  # an option that click does not know
        raise click.UsageError(
            f"{bundle} was found in the place of BUNDLE. "
            f"The bundle comes first: optimize {command} BUNDLE {bundle} ..."
        )
    options = ["--json"] if as_json and "--json" not in arguments else []
    words = [command, "--bundle", str(bundle), *options, *arguments]
    raise SystemExit(main(words, program="optimize"))
