"""Names say what a thing is, not how it came about: `candidate`, not `found`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.house import facts

PACKAGE = Path(__file__).parents[2] / "optimizer"
REFUSED = frozenset({"found", "made", "asked", "given", "said", "told", "wanted", "held"})
FILES = sorted(PACKAGE.rglob("*.py"))


def refused(names: Iterable[tuple[str, int]]) -> list[str]:
    return [f"line {line}: {name}" for name, line in names if name.strip("_") in REFUSED]


def test_every_name_says_what_the_thing_is() -> None:
    lapses = {str(f.relative_to(PACKAGE)): refused(facts.of(f).bound) for f in FILES}
    assert {file: names for file, names in lapses.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "found = 1",
        "made: int",
        "def f(given): pass",
        "def f(*, _wanted=None): pass",
        "def asked(): pass",
        "class A:\n    held: int",
        "self.told = 0",
        "[said for said in x]",
        "import x as made",
        "try: pass\nexcept E as told: pass",
        "match x:\n    case [held]: pass",
    ],
)
def test_a_name_that_does_not_is_refused_wherever_it_is_bound(source: str) -> None:
    assert refused(facts.read(source).bound)


def test_a_name_that_does_is_not() -> None:
    source = "missing_keys = [f(found=1) for candidate in found]"
    assert refused(facts.read(source).bound) == []
