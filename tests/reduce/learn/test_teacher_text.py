"""Windows that the teacher generated are added to the given ones, and never judge."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from optimizer.harness import contract as contracts
from optimizer.recipe.compression import composition
from optimizer.recipe.recover import Recover
from optimizer.recipe.schema import DataSpec, Recovery
from optimizer.reduce.learn import recover, training
from optimizer.reduce.learn.distill import Split, draw_texts
from optimizer.reduce.learn.teacher_text import add_teacher_text
from tests.compress import checkpoints
from tests.conftest import write_rows
from tests.reduce.smaller import loaded, reduced

SECTION = Recover(  # precision auto is timed, and the times are in what is written
    samples=40,
    held_out=8,
    sequence_length=16,
    batch_size=8,
    steps=6,
    generated=12,
    precision="fp32",
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loaded("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataSpec:
    folder = tmp_path_factory.mktemp("rows")
    write_rows(folder / "texts.jsonl", 100, seed=5)
    return DataSpec(source="json", files=("texts.jsonl",), base=str(folder))


def split(reference: Path, data: DataSpec, folder: Path, **changes: Any) -> tuple[Split, Split]:
    """(recipe's texts, the same with the teacher's)."""
    section = SECTION.model_copy(update=changes)
    folder.mkdir(exist_ok=True)
    contract = contracts.read(reference / "contract.json")
    given = draw_texts(section, data, contract, reference / "checkpoint")
    return given, add_teacher_text(section, given, reference, folder)


def ids(parts: Split) -> torch.Tensor:
    return parts.learned.batch(range(len(parts.learned.rows)))["input_ids"]


def test_own_windows_follow_the_given_ones_and_none_judges(
    reference: Path, data: DataSpec, tmp_path: Path
) -> None:
    given, both = split(reference, data, tmp_path)
    before = len(given.learned.rows)
    assert torch.equal(ids(both)[:before], ids(given))
    assert ids(both).shape == (before + 12, 16)
    assert both.held_out is given.held_out


def test_they_depend_on_the_seed_alone(reference: Path, data: DataSpec, tmp_path: Path) -> None:
    one, again = (ids(split(reference, data, tmp_path / n)[1])[-12:] for n in ("a", "b"))
    assert torch.equal(one, again)
    contract = contracts.read(reference / "contract.json")
    given = draw_texts(SECTION, data, contract, reference / "checkpoint")
    other = SECTION.model_copy(update={"seed": 1})
    assert not torch.equal(ids(add_teacher_text(other, given, reference, tmp_path))[-12:], one)


def test_what_was_written_before_a_kill_is_not_written_again(
    reference: Path, data: DataSpec, tmp_path: Path
) -> None:
    split(reference, data, tmp_path)
    file = tmp_path / "generated.safetensors"
    before = file.stat().st_ino
    split(reference, data, tmp_path)
    assert file.stat().st_ino == before


def test_a_killed_training_on_own_text_resumes_to_the_same_bytes(
    reference: Path, data: DataSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smaller = reduced(reference, tmp_path / "smaller", {"keep": 0.7}, importance="magnitude")
    section = Recovery(recover=SECTION, data=data, task="text-generation")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    recover.run(section, reference, smaller, whole)

    class Killed(BaseException):
        pass

    def dies(self: Any, backward: Any) -> None:
        if self.done == 3:
            self.save()
            raise Killed
        original(self, backward)

    original = training._Run.step
    monkeypatch.setattr(training._Run, "step", dies)
    with pytest.raises(Killed):
        recover.run(section, reference, smaller, killed)
    monkeypatch.undo()
    recover.run(section, reference, smaller, killed)
    assert checkpoints.contents(killed) == checkpoints.contents(whole)
    document = json.loads((whole / "recovered.json").read_text())
    plain = section.model_copy(update={"recover": SECTION.model_copy(update={"generated": 0})})
    other = tmp_path / "given alone"
    other.mkdir()
    recover.run(plain, reference, smaller, other)
    assert json.loads((other / "recovered.json").read_text())["train"] != document["train"]


def test_a_model_that_writes_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match="only task text-generation generates text"):
        composition.check_generated(SECTION, "sentence-embedding")
    composition.check_generated(SECTION, "text-generation")
