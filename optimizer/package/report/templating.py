"""Templates of report.html and their filters."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

FOLDER = Path(__file__).parent / "templates"
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@cache
def environment() -> Environment:
    """Return the Jinja environment of the report's templates: it escapes values; undefined names
    are errors."""
    drawn = Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_visible,
    )
    drawn.filters["pixels"] = _pixels
    return drawn


def _visible(value: Any) -> Any:
    """Replace in the report control and bidirectional-override characters, which could disguise
    text, by U+FFFD. Markup of macros was already processed."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return _CONTROL.sub("\ufffd", value.encode("utf-8", "replace").decode("utf-8"))


def _pixels(value: float) -> str:
    """Format pixels for the report page with at most two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
