"""YAML with the line of every value, so that a message can say file:line.

Accepted is plain YAML: mappings with words as keys, lists, strings, numbers, true, false and null;
anchors and merge keys as long as they unfold to few values. Dates, bytes, sets, tags and a value
that contains itself are refused by name: the schema has no use for them, and some serve to exhaust
memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from optimizer.foundation.errors import RecipeError
from optimizer.foundation.reading import read_text

Loc = tuple[Any, ...]

BYTES = 1_000_000  # a recipe of a thousand lines has 40,000
VALUES = 20_000  # after every alias is unfolded; the largest recipe here has 200
DEPTH = 40  # a recipe's deepest value lies 5 below its top
DIGITS = 40  # of a number; a 64-bit integer has 19
PLAIN = "a mapping, a list, a string, a number, true, false or null"
TAGS = {f"tag:yaml.org,2002:{t}" for t in ("map", "seq", "str", "int", "float", "bool", "null")}
WORD, MERGE = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"


class _TooLarge(yaml.MarkedYAMLError):
    """Refusal of a document with too many YAML values or levels.

    problem: its text for the message; note: the next step
    """


class YamlLoader(yaml.SafeLoader):
    """YAML loader that reads 1e-3 as a number, as YAML 1.2 does; in YAML 1.1 it is a string, for
    lack of a point. Raises _TooLarge at the first value beyond VALUES or DEPTH."""

    values = depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        self.values += 1
        self.depth += isinstance(event, yaml.CollectionStartEvent)
        if self.depth > DEPTH:
            problem = f"it is nested more than {DEPTH} levels deep"
            raise _TooLarge(problem=problem, problem_mark=event.start_mark)
        if self.values > VALUES:
            raise _TooLarge(
                problem=f"it has more than {VALUES:,} values",
                problem_mark=event.start_mark,
                note="A list of data belongs in a file that data.files names.",
            )
        node = super().compose_node(parent, index)
        self.depth -= isinstance(event, yaml.CollectionStartEvent)
        return node


YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


@dataclass
class Lines:
    """Places of a document's values: {path in the document: "file:line"}."""

    file: str
    _at: dict[Loc, str] = field(default_factory=dict)

    def note(self, loc: Loc, where: str) -> None:
        """Record the place of the value at `loc`."""
        self._at[loc] = where

    @property
    def sections(self) -> set[str]:
        """Top-level keys of the document."""
        return {str(loc[0]) for loc in self._at if loc}

    def graft(self, prefix: Loc, other: Lines) -> None:
        """Add the places of a file that is included at the path `prefix`."""
        for loc, where in other._at.items():
            self._at[prefix + loc] = where

    def where(self, loc: Loc) -> str:
        """Return "file:line" of `loc` or of the nearest section that contains it; else the file."""
        while loc and loc not in self._at:
            loc = loc[:-1]
        return self._at.get(loc, self.file)


def read_yaml(path: Path) -> tuple[dict[str, Any], Lines]:
    """Read any YAML file, such as a recipe or a data spec; returns the mapping in the file, and the
    lines of its values.

    Raises RecipeError for a missing, unreadable, irregular or too large file, bad YAML, a repeated
    key (YAML itself would keep the last one), a value that is not plain, or a document that is not
    a mapping; MachineError for a missing permission.
    """
    lines = Lines(str(path))
    text = read_text(path, BYTES, RecipeError, "Check the path.")
    node = _compose(text, str(path), numbered=True)
    if not isinstance(node, yaml.MappingNode):
        raise RecipeError("empty, or not a mapping of keys to values", where=str(path))
    _walk(node, (), lines)
    document: dict[str, Any] = _construct(node, str(path))
    return document, lines


def read_value(text: str, where: str) -> Any:
    """Parse one YAML value of a command line. Raises RecipeError as `read_yaml`."""
    node = _compose(text, where, numbered=False)
    return None if node is None else _construct(node, where)


def _compose(text: str, where: str, numbered: bool) -> yaml.Node | None:
    def at(mark: Any) -> str:
        return f"{where}:{mark.line + 1}" if mark and numbered else where

    try:
        node: yaml.Node | None = yaml.compose(text, Loader=YamlLoader)
    except _TooLarge as e:
        raise RecipeError(str(e.problem), where=at(e.problem_mark), fix=e.note or "") from None
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        problem = getattr(e, "problem", None) or " ".join(str(e).split())
        raise RecipeError(f"not valid YAML: {problem}", where=at(mark)) from None
    if node is not None:
        _check_unfolded(node, at)
    return node


def _check_unfolded(node: yaml.Node, at: Any) -> None:
    """Refuse values that are not plain, and too many values once aliases are unfolded."""
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()

    def size(inner: yaml.Node) -> int:
        if id(inner) in sizes:
            return sizes[id(inner)]
        if id(inner) in open_nodes:
            raise RecipeError("it contains itself", where=at(inner.start_mark), accepted=PLAIN)
        open_nodes.add(id(inner))
        _check_plain(inner, at)
        total = 1 + sum(size(part) for part in _parts(inner))
        if total > VALUES:
            raise RecipeError(
                f"its aliases unfold to more than {VALUES:,} values", where=at(inner.start_mark)
            )
        open_nodes.discard(id(inner))
        sizes[id(inner)] = total
        return total

    size(node)


def _parts(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        yield from node.value
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key
            yield value


def _check_plain(node: yaml.Node, at: Any) -> None:
    """Raise RecipeError for a node that is not plain YAML: keys other than words, special types,
    characters that are not text, and numbers with too many digits.

    at: function from a mark of the parser to "file:line"
    """
    where = at(node.start_mark)
    if isinstance(node, yaml.MappingNode):
        for key, _ in node.value:
            if key.tag not in (WORD, MERGE):
                shown = key.value if isinstance(key, yaml.ScalarNode) else "a list or mapping"
                raise RecipeError(
                    f"key {str(shown)[:80]!r} is {_kind(key.tag)}",
                    where=at(key.start_mark),
                    accepted="words as keys",
                    fix="Put it in quotes if it is meant as a word.",
                )
    if node.tag not in TAGS and node.tag != MERGE:
        value = node.value if isinstance(node, yaml.ScalarNode) else "a value"
        raise RecipeError(
            f"{str(value)[:80]!r} is {_kind(node.tag)}",
            where=where,
            accepted=PLAIN,
            fix="Put it in quotes if it is meant as a string.",
        )
    if not isinstance(node, yaml.ScalarNode):
        return
    if node.tag == WORD and not _is_text(node.value):
        raise RecipeError(
            f"{node.value[:80]!r} holds a NUL or a lone surrogate",
            where=where,
            accepted="text",
        )
    if node.tag.endswith((":int", ":float")) and len(node.value) > DIGITS:
        raise RecipeError(
            f"the number {node.value[:20]}… has {len(node.value):,} characters",
            where=where,
            accepted=f"{DIGITS} or fewer",
        )


def _is_text(value: str) -> bool:
    return "\0" not in value and not any("\ud800" <= c <= "\udfff" for c in value)


def _kind(tag: str) -> str:
    return f"of YAML's kind {tag.rpartition(':')[2].lstrip('!')}"


def _construct(node: yaml.Node, where: str) -> Any:
    """Return the value of a node. Each alias gets a copy, so that changing one leaves the
    others."""
    loader = YamlLoader("")
    try:
        return json.loads(json.dumps(loader.construct_document(node)))
    except (yaml.YAMLError, ValueError) as e:  # e.g. a merge key of a value that is not a mapping
        problem = getattr(e, "problem", None) or " ".join(str(e).split())
        raise RecipeError(f"not valid YAML: {problem}", where=where) from None
    finally:
        loader.dispose()


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
