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
def strings() -> str:
    """Every string in the product, one a line, values of an f-string written as a hole."""
    lines = []
    for file in sorted((ROOT / "optimizer").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = [v.value if isinstance(v, ast.Constant) else HOLE for v in node.values]
                lines.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                lines.append(node.value)
    return "\n".join(line.replace("\n", " ") for line in lines)


def expression(message: str) -> str:
    """The fixed words of a message in their order, within one string."""
    return ".*".join(re.escape(part.strip()) for part in message.split(HOLE))


def test_the_page_has_the_messages_that_a_user_meets_most() -> None:
    assert len(MESSAGES) >= 30
    assert len(set(MESSAGES)) == len(MESSAGES)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_one_of_the_product(message: str) -> None:
    assert re.search(expression(message), strings()), "reworded: correct the page"


def test_words_that_no_message_has_are_not_found() -> None:
    assert not re.search(expression("the moon is … and this machine has"), strings())
