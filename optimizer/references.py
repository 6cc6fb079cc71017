"""What is named by a string: "package.module:attribute", and entry points of other packages.

A table whose rows must import neither torch nor onnx names functions this way; they are imported
where they are called.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import Any


def resolve(reference: str) -> Any:
    """The object that "package.module:attribute" names. Raises ImportError or AttributeError."""
    module, _, attribute = reference.partition(":")
    return getattr(import_module(module), attribute)


def from_entry_point(group: str, name: str) -> Any:
    """What an installed distribution offers as `name` in `group`. Raises KeyError where none
    does."""
    for point in entry_points(group=group, name=name):
        return point.load()
    raise KeyError(name)
