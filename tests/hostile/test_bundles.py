"""No bundle, archive, line or option ends in exit 1, or in a message that names nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.hostile import bundle_cases
from tests.hostile.bundle_cases import Case

SAMPLE = 700


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    folder = tmp_path_factory.mktemp("hostile bundles")
    return bundle_cases.every(bundle_cases.make(folder), folder)


def bad(cases: list[Case]) -> dict[str, str]:
    return {case.name: problem for case in cases if (problem := case.run())}


def test_wrong_bundles_are_refused_by_name(cases: list[Case]) -> None:
    assert bad(random.Random(13).sample(cases, SAMPLE)) == {}


@pytest.mark.slow
def test_every_wrong_bundle_is_refused_by_name(cases: list[Case]) -> None:
    assert len(cases) > 3500
    assert bad(cases) == {}


def test_a_bundle_with_nothing_wrong_is_taken(tmp_path: Path) -> None:
    """What the cases change does what it should before."""
    good = bundle_cases.make(tmp_path)
    for name in bundle_cases.COMMANDS:
        arguments = bundle_cases.command(name, good.encoder)
        assert bundle_cases.ended(arguments, accepted=(0,)) == ""
    assert bundle_cases.ended(["check", str(good.tar)], accepted=(0,)) == ""
    line = b'{"prompt": "good", "max_new_tokens": 2}\n'
    arguments = ["predict", str(good.decoder), "--jsonl"]
    assert bundle_cases.ended(arguments, accepted=(0,), data=line) == ""


def test_a_command_that_ends_otherwise_is_noticed(tmp_path: Path) -> None:
    assert "exit 2" in bundle_cases.ended(["check", str(tmp_path)], accepted=(0,))
    assert "names none" in bundle_cases.ended(["check", str(tmp_path)], ["something else"])
