"""Entry point of `python -m harness` in the folder of a bundle: see commands/command_line.py."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command of `python -m harness`; returns the exit code."""
    from .commands.command_line import main as run

    return run(arguments)


def _checked() -> bool:
    """Return True if __init__.py, which verifies every other file before its import, has run."""
    from importlib import import_module

    return hasattr(import_module(__package__ or "harness"), "describe_damage")


if __name__ == "__main__":
    if not _checked():
        print("harness/__init__.py is missing or damaged. Get the bundle again.", file=sys.stderr)
        raise SystemExit(2)
    raise SystemExit(main())
