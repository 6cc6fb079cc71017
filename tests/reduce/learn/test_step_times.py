"""bf16 is chosen where it is faster, and not because an instruction for it exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from optimizer.compress.walk.products import TIMED, TYPES, ProductSettings
from optimizer.foundation.process.launch import Processes
from optimizer.harness import contract as contracts
from optimizer.recipe.recover import Recover
from optimizer.recipe.schema import DataSpec
from optimizer.reduce.learn import step_times
from optimizer.reduce.learn.distill import TrainingTexts, draw_texts
from optimizer.reduce.learn.pair import TeacherAndStudent, open_pair
from tests.conftest import write_rows
from tests.reduce.smaller import loaded

SECTION = Recover(samples=24, held_out=8, sequence_length=16, batch_size=8)
Learned = tuple[TeacherAndStudent, TrainingTexts]


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Learned:
    root = tmp_path_factory.mktemp("products")
    folder = loaded("bert", root)
    write_rows(root / "texts.jsonl", 40, seed=1)
    rows = DataSpec(source="json", files=("texts.jsonl",), base=str(root))
    contract = contracts.read(folder / "contract.json")
    split = draw_texts(SECTION, rows, contract, folder / "checkpoint")
    return open_pair(folder, folder, None, SECTION.losses), split.learned


def chosen(learned: Learned, folder: Path, seconds: dict[str, list[float]]) -> Any:
    """Products that are chosen by these times of steps."""
    pair, rows = learned
    return step_times.choose_products(SECTION, pair, rows, folder, timing=lambda *_: seconds)


def test_bf16_is_taken_where_its_slowest_step_was_faster_than_float32s_fastest(
    learned: Learned, tmp_path: Path
) -> None:
    for name, bf16, expected in (("a", [1.0, 1.9], "bf16"), ("b", [1.0, 2.1], "fp32")):
        (tmp_path / name).mkdir()
        timed = {"fp32": [2.0, 3.0], "bf16": bf16}
        assert chosen(learned, tmp_path / name, timed).precision == expected


def test_a_run_that_goes_on_takes_what_it_took(learned: Learned, tmp_path: Path) -> None:
    first = chosen(learned, tmp_path, {"fp32": [2.0], "bf16": [1.0]})
    assert chosen(learned, tmp_path, {"fp32": [1.0], "bf16": [2.0]}) == first
    assert first.dtype == torch.bfloat16


def test_a_precision_of_the_recipe_is_not_timed(learned: Learned, tmp_path: Path) -> None:
    pair, rows = learned
    for precision in ("fp32", "bf16"):
        section = SECTION.model_copy(update={"precision": precision})
        assert step_times.choose_products(section, pair, rows, tmp_path) == ProductSettings(
            precision, {}
        )
    assert not list(tmp_path.iterdir())


def test_timing_changes_no_parameter_and_leaves_no_gradient(learned: Learned) -> None:
    pair, rows = learned
    before = {n: p.detach().clone() for n, p in pair.student.named_parameters()}
    seconds = step_times.time_steps(SECTION, pair, rows)
    assert {n: len(s) for n, s in seconds.items()} == dict.fromkeys(TYPES, TIMED)
    assert all(torch.equal(p, before[n]) for n, p in pair.student.named_parameters())
    assert all(p.grad is None for p in pair.student.parameters())


def test_every_process_takes_what_the_first_measured(learned: Learned, tmp_path: Path) -> None:
    class Second(Processes):
        def of_first(self, numbers: Any) -> list[float]:
            return [1.0]

    pair, rows = learned
    timing = {"fp32": [1.0], "bf16": [2.0]}
    got = step_times.choose_products(
        SECTION, pair, rows, tmp_path, Second(rank=1, count=2), lambda *_: timing
    )
    assert got.precision == "bf16"
    assert not list(tmp_path.iterdir())
