"""Every message that docs/troubleshooting.md quotes is one of the product."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGES = re.findall(r"^\| `([^`]*)` \|", PAGE, re.M)
HOLE = "…"


@cache
def sources() -> dict[Path, str]:
    """{file of the product: its text}."""
    return {f: f.read_text(encoding="utf-8") for f in (ROOT / "optimizer").rglob("*.py")}


@cache
def strings(file: Path) -> str:
    """Every string in a file, one a line, values of an f-string written as a hole."""
    lines = []
    for node in ast.walk(ast.parse(sources()[file])):
        if isinstance(node, ast.JoinedStr):
            parts = [v.value if isinstance(v, ast.Constant) else HOLE for v in node.values]
            lines.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            lines.append(node.value)
    return "\n".join(line.replace("\n", " ") for line in lines)


def expression(message: str) -> str:
    """The fixed words of a message in their order, within one string."""
    return ".*".join(re.escape(part.strip()) for part in message.split(HOLE))


def is_of_the_product(message: str) -> bool:
    """Return True if a string has the message. Only files with all of its words are parsed."""
    words = re.findall(r"\w{4,}", message)
    files = (f for f, source in sources().items() if all(word in source for word in words))
    return any(re.search(expression(message), strings(file)) for file in files)


def test_the_page_has_the_messages_that_a_user_meets_most() -> None:
    assert len(MESSAGES) >= 30
    assert len(set(MESSAGES)) == len(MESSAGES)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_one_of_the_product(message: str) -> None:
    assert is_of_the_product(message), "reworded: correct the page"


def test_words_that_no_message_has_are_not_found() -> None:
    assert not is_of_the_product("the moon is … and this machine has")
