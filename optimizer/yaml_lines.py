"""YAML with the line of every value, so that a message can say file:line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from optimizer.errors import RecipeError

Loc = tuple[Any, ...]


@dataclass
class Lines:
    """Where each path of a document was written: "file:line"."""

    file: str
    _at: dict[Loc, str] = field(default_factory=dict)

    def note(self, loc: Loc, where: str) -> None:
        self._at[loc] = where

    @property
    def sections(self) -> set[str]:
        """The top-level keys."""
        return {str(loc[0]) for loc in self._at if loc}

    def graft(self, prefix: Loc, other: Lines) -> None:
        """Take over the lines of a file included at `prefix`."""
        for loc, where in other._at.items():
            self._at[prefix + loc] = where

    def where(self, loc: Loc) -> str:
        """The line of `loc`, or of the nearest section that contains it."""
        while loc and loc not in self._at:
            loc = loc[:-1]
        return self._at.get(loc, self.file)


def read_yaml(path: Path) -> tuple[dict[str, Any], Lines]:
    """The mapping in a YAML file and its lines.

    Raises RecipeError for a missing or unreadable file, bad YAML, a repeated key (plain YAML
    would silently keep the last one), or a document that is not a mapping.
    """
    lines = Lines(str(path))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise RecipeError(f"cannot be read ({e})", where=str(path), fix="Check the path.") from None
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        document = yaml.safe_load(text)
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        at = f"{path}:{mark.line + 1}" if mark else str(path)
        raise RecipeError(f"not valid YAML: {getattr(e, 'problem', e)}", where=at) from None
    if not isinstance(document, dict) or node is None:
        raise RecipeError("empty, or not a mapping of keys to values", where=str(path))
    _walk(node, (), lines)
    return document, lines


def _walk(node: yaml.Node, loc: Loc, lines: Lines) -> None:
    lines._at.setdefault(loc, f"{lines.file}:{node.start_mark.line + 1}")
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            where = f"{lines.file}:{key.start_mark.line + 1}"
            if key.value in seen:
                raise RecipeError(
                    f"key {key.value!r} is given twice", where=where, fix="Remove one of them."
                )
            seen.add(key.value)
            lines.note((*loc, key.value), where)
            _walk(value, (*loc, key.value), lines)
    elif isinstance(node, yaml.SequenceNode):
        for i, value in enumerate(node.value):
            _walk(value, (*loc, i), lines)
