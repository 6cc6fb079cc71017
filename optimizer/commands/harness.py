"""Commands that a bundle's own harness answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

PASS_ON: dict[str, Any] = {"ignore_unknown_options": True, "allow_extra_args": True}
"""context_settings of such a command: the harness knows the options."""


def harness(command: str, bundle: Path, arguments: tuple[str, ...], as_json: bool) -> NoReturn:
    """Raises SystemExit with the harness's exit code."""
    from optimizer.harness.__main__ import main

    options = ["--json"] if as_json and "--json" not in arguments else []
    raise SystemExit(main([command, "--bundle", str(bundle), *options, *arguments]))
