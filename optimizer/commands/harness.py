"""Pass a command on to the harness of a bundle."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

PASS_ON: dict[str, Any] = {"ignore_unknown_options": True, "allow_extra_args": True}
"""context_settings of a command whose options only the harness knows."""


def harness(command: str, bundle: Path, arguments: tuple[str, ...], as_json: bool) -> NoReturn:
    """Run a command of the harness. Raises SystemExit with the command's exit code."""
    from optimizer.harness.__main__ import main

    options = ["--json"] if as_json and "--json" not in arguments else []
    raise SystemExit(main([command, "--bundle", str(bundle), *options, *arguments]))
