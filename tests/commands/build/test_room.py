"""A run that exceeds the machine is refused before any work, with an option to force it."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from optimizer.cli import main
from optimizer.commands.build import room
from optimizer.foundation.errors import MachineError
from tests.conftest import write_tiny_recipe

STEPS = [
    {"stage": "load", "what": "run", "memory": 2_000, "disk": 10},
    {"stage": "compress", "what": "run", "memory": 9_000, "disk": 10},
    {"stage": "export", "what": "reuse"},
]


def test_the_stage_that_needs_most_is_named(tmp_path: Path) -> None:
    room.check(STEPS, tmp_path, 9_000)
    room.check(STEPS, tmp_path, None)
    with pytest.raises(MachineError, match=r"stage compress: .*--ignore-estimate"):
        room.check(STEPS, tmp_path, 8_999)


def test_disk_is_that_of_all_steps_together(tmp_path: Path) -> None:
    much = [{"stage": "load", "what": "run", "memory": 1, "disk": 10**17} for _ in range(100)]
    with pytest.raises(MachineError, match=r"predicted disk use is .* are free"):
        room.check(much, tmp_path / "not" / "there", 10**12)


def test_a_reused_step_needs_nothing(tmp_path: Path) -> None:
    room.check([{"stage": "compress", "what": "reuse"}], tmp_path, 1)


def test_this_machine_says_what_it_has() -> None:
    memory = room.read_memory_limit()
    assert memory is not None
    assert memory > 1_000_000_000


def test_the_estimate_can_be_ignored(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_tiny_recipe(tmp_path, tiny_bert)
    monkeypatch.setattr(room, "read_memory_limit", lambda: 1_000)
    arguments = ["run", str(recipe), "--until", "load", "--store", str(tmp_path / "store")]
    refused = CliRunner().invoke(main, arguments)
    assert (refused.exit_code, "stage load" in refused.stderr) == (5, True)
    assert CliRunner().invoke(main, [*arguments, "--ignore-estimate"]).exit_code == 0


@pytest.mark.parametrize("option", ["--store", "--artifacts"])
def test_a_place_that_cannot_be_is_refused_before_any_work(
    tiny_bert: Path, tmp_path: Path, option: str
) -> None:
    recipe = write_tiny_recipe(tmp_path / "recipe", tiny_bert)
    (tmp_path / "file").write_text("")
    names = ["x" * 300, *(["file"] if option == "--artifacts" else [])]
    for name in names:
        arguments = ["run", str(recipe), "--until", "load", "--store", str(tmp_path / "store")]
        done = CliRunner().invoke(main, [*arguments, option, str(tmp_path / name)])
        assert (done.exit_code, option in done.stderr) == (5, True), done.stderr
    assert not list(tmp_path.glob("store/load/*"))
