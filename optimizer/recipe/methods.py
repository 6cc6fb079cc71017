"""The methods of compression."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RENAMED: Mapping[str, str] = {
    "distill": "scale_tuning",
    "keep": "pass_through",
    "rotate": "rotation",
}
"""{a method's name in earlier versions: its name today}."""


def refuse_old_name(name: Any) -> Any:
    """name, unless it is one of earlier versions: ValueError with today's."""
    if isinstance(name, str) and name in RENAMED:
        raise ValueError(f"{name} is called {RENAMED[name]} now; use {RENAMED[name]}")
    return name
