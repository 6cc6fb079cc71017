"""No bundle, archive, line or option ends in exit 1, or in a message that names nothing."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.hostile.cases import COMMANDS, Case, command, ended, make
from tests.hostile.written import bundles

SAMPLE = 700


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    folder = tmp_path_factory.mktemp("hostile bundles")
    return bundles.every(make(folder), folder)


def bad(cases: list[Case]) -> dict[str, str]:
    return {case.name: problem for case in cases if (problem := case.run())}


def test_wrong_bundles_are_refused_by_name(cases: list[Case]) -> None:
    assert bad(random.Random(13).sample(cases, SAMPLE)) == {}


@pytest.mark.slow
def test_every_wrong_bundle_is_refused_by_name(cases: list[Case]) -> None:
    assert len(cases) > 3500
    assert bad(cases) == {}


def test_a_bundle_with_nothing_wrong_is_taken(tmp_path: Path) -> None:
    """The bundles that cases change are valid before."""
    good = make(tmp_path)
    for name in COMMANDS:
        arguments = command(name, good.encoder)
        assert ended(arguments, accepted=(0,)) == ""
    assert ended(["check", str(good.tar)], accepted=(0,)) == ""
    line = b'{"prompt": "good", "max_new_tokens": 2}\n'
    arguments = ["predict", str(good.decoder), "--jsonl"]
    assert ended(arguments, accepted=(0,), data=line) == ""


def test_a_command_that_ends_otherwise_is_noticed(tmp_path: Path) -> None:
    assert "exit 2" in ended(["check", str(tmp_path)], accepted=(0,))
    assert "names none" in ended(["check", str(tmp_path)], ["something else"])
