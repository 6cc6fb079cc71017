"""Versions of runtimes, as numbers that can be compared."""

from __future__ import annotations


def parse_version(dotted: str) -> tuple[int, ...]:
    """Parse the leading numbers of a runtime's version: "10.13.0rc1" -> (10, 13)."""
    leading = []
    for part in dotted.split("."):
        if not part.isdigit():
            break
        leading.append(int(part))
    return tuple(leading)
