"""No bundle, archive, line or option ends in exit 1, or in a message that names nothing."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from tests.hostile.cases import COMMANDS, Case, command, ended, make
from tests.hostile.written import bundles
from tests.package.bundles import small_bundle

SAMPLE = 500


def bad(cases: list[Case]) -> dict[str, str]:
    return {case.name: problem for case in cases if (problem := case.run())}


def test_wrong_bundles_are_refused_by_name(tmp_path: Path) -> None:
    """Bundles with few sources of the harness: more of the cases are about other files."""
    good = make(tmp_path)
    encoder = small_bundle.lean(good.encoder, tmp_path / "few" / "encoder")
    decoder = small_bundle.lean(good.decoder, tmp_path / "few" / "decoder")
    cases = bundles.every(replace(good, encoder=encoder, decoder=decoder), tmp_path)
    assert bad(random.Random(13).sample(cases, SAMPLE)) == {}


@pytest.mark.slow
def test_every_wrong_bundle_is_refused_by_name(tmp_path: Path) -> None:
    cases = bundles.every(make(tmp_path), tmp_path)
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
