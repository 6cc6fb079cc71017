"""Look up objects named by a string "package.module:attribute", and other packages' entry points.

Tables that must import neither torch nor onnx name functions this way; a function is imported where
it is called.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from optimizer.foundation.errors import RecipeError
from optimizer.foundation.source_digest import digest_sources


def resolve(reference: str) -> Any:
    """Import and return the object that "package.module:attribute" names. Raises ImportError or
    AttributeError."""
    module, _, attribute = reference.partition(":")
    return getattr(import_module(module), attribute)


def load_entry_point(group: str, name: str) -> Any:
    """Load the entry point `name` of `group` and return its object. Raises KeyError where no
    package offers it."""
    point = find_entry_point(group, name)
    if point is None:
        raise KeyError(name)
    return point.load()


def list_entry_points(group: str) -> list[str]:
    """List the names of methods, targets or tasks that other packages offer as entry points in
    `group`, sorted."""
    return sorted({point.name for point in entry_points(group=group)})


def find_entry_point(group: str, name: str) -> EntryPoint | None:
    """Return the entry point `name` of `group`, or None. Raises RecipeError where two packages
    offer it."""
    points = list(entry_points(group=group, name=name))
    if len(points) > 1:
        owners = ", ".join(sorted(p.dist.name if p.dist else p.value for p in points))
        raise RecipeError(
            f"{len(points)} packages offer {name!r} in {group}",
            where=owners,
            fix="Uninstall all but one.",
        )
    return points[0] if points else None


def record_code(group: str, name: str) -> dict[str, str]:
    """Return {"record of NAME": digest of the entry point's module, "version of NAME": version of
    its distribution}, for the key of a step that uses the record. {} without such an entry
    point."""
    point = find_entry_point(group, name)
    if point is None:
        return {}
    version = point.dist.version if point.dist else ""
    return {
        f"record of {name}": digest_sources(point.module, own=True),
        f"version of {name}": version,
    }
