"""The benchmark of false alarms: its sample is balanced, its interval right, and a cell runs."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.ledger import false_alarm_models as models
from benchmarks.ledger import false_alarm_table as table
from benchmarks.ledger import false_alarm_worker as worker
from benchmarks.ledger import false_alarms
from benchmarks.ledger.false_alarm_cells import AXES, Cell, cells, covered, drawn_cell

COUNT = 300
FREE = [a for a in AXES if a.startswith(("compress", "validate")) or a in ("model", "seed")]
"""The axes that bind no other."""
TINY = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
}


@pytest.fixture(scope="module")
def chosen() -> list[Cell]:
    return cells(COUNT, seed=0)


def test_the_same_seed_gives_the_same_cells_and_fewer_are_their_beginning(
    chosen: list[Cell],
) -> None:
    assert cells(40, seed=0) == chosen[:40]
    assert cells(40, seed=1) != chosen[:40]
    assert len({c.key for c in chosen}) == COUNT


@pytest.mark.parametrize("axis", FREE)
def test_values_of_a_free_axis_occur_about_equally_often(chosen: list[Cell], axis: str) -> None:
    counted = Counter(getattr(c, axis) for c in chosen)
    assert set(counted) == set(AXES[axis])
    assert max(counted.values()) <= 1.2 * min(counted.values())


def test_the_methods_of_a_model_occur_about_equally_often(chosen: list[Cell]) -> None:
    for model in AXES["model"]:
        counted = Counter(c.method for c in chosen if c.model == model)
        assert max(counted.values()) - min(counted.values()) <= 1


def test_the_dialects_that_take_a_scheme_occur_about_equally_often(chosen: list[Cell]) -> None:
    for scheme in AXES["scheme"]:
        counted = Counter(c.dialect for c in chosen if c.scheme == scheme)
        assert max(counted.values()) <= 1.2 * min(counted.values())
        assert len(counted) == (1 if scheme == "W8A8 per token" else len(AXES["dialect"]))


def test_every_pair_of_values_that_a_recipe_can_have_occurs(chosen: list[Cell]) -> None:
    chance = random.Random(5)
    possible = Counter(pair for _ in range(1500) for pair in covered([drawn_cell(AXES, chance)]))
    common = {pair for pair, times in possible.items() if times > 15}
    missing = common - covered(chosen)
    assert len(missing) <= len(common) / 100, sorted(map(str, missing))


@pytest.mark.parametrize(("events", "runs"), [(0, 300), (3, 20), (20, 20), (1, 1)])
def test_the_interval_leaves_half_of_five_percent_on_each_side(events: int, runs: int) -> None:
    def chance_of(counts: range, p: float) -> float:
        return sum(math.comb(runs, k) * p**k * (1 - p) ** (runs - k) for k in counts)

    low, high = table.interval(events, runs)
    if events:
        assert chance_of(range(events, runs + 1), low) == pytest.approx(0.025)
    if events < runs:
        assert chance_of(range(events + 1), high) == pytest.approx(0.025)
    assert (low == 0, high == 1) == (events == 0, events == runs)


def test_a_cell_passes_and_its_row_becomes_a_page(tmp_path: Path, chosen: list[Cell]) -> None:
    row = tiny_row(tmp_path, chosen)
    assert row["refused"] is None
    assert {kind.partition(":")[0] for kind, _, _ in row["ratios"]} >= {"export", "lower", "engine"}
    document = table.summary([row], about())
    assert document["largest_ratio"]["ratio"] == max(r for _, r, _ in row["ratios"])
    assert "0 of 1 runs refused" in table.markdown(document)
    (shared,) = (tmp_path / "graphs").iterdir()
    assert (shared / "model.onnx").samefile(tmp_path / "run" / "graph" / "model.onnx")


def test_a_refused_run_is_counted_and_an_unsupported_recipe_is_no_run(chosen: list[Cell]) -> None:
    def row(cell: Cell, kind: str) -> dict[str, Any]:
        refused = {"stage": "validate", "hop": "lower", "kind": kind, "messages": ["as it is"]}
        ratios = [("lower: outputs", 1.5, "logits")]
        return {"cell": asdict(cell), "refused": refused, "ratios": ratios, "seconds": 1.0}

    kinds = ("verdict", "crash", "unsupported")
    rows = list(itertools.starmap(row, zip(chosen, kinds, strict=False)))
    document = table.summary(rows, about())
    assert (document["refused"], document["runs"]) == (2, 2)
    page = table.markdown(document)
    assert all(c.key in page for c in chosen[:3])


def test_only_whole_rows_of_the_same_code_are_finished(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"key": "a", "code": "1"}\n{"key": "b", "code": "2"}\n{"key": "c", "co')
    assert list(false_alarms.finished(file, "1")) == ["a"]


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_a_random_model_is_the_same_each_time_it_is_made(tmp_path: Path, kind: str) -> None:
    made = [tmp_path / name for name in ("one", "other")]
    for folder in made:
        models.write_random(folder, 0, kind, TINY)
    for file in made[0].iterdir():
        assert file.read_bytes() == (made[1] / file.name).read_bytes(), file.name


def test_a_child_that_raises_is_an_answer_and_its_log_says_why(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    request = {"do": "compress", "cell": {}, "log": str(log), "limit": 60, "environment": {}}
    assert worker.forked(request)["status"] == 1
    assert "TypeError" in log.read_text()


class Pretended:
    """Worker that records its requests and whose children end as in `ends`."""

    def __init__(self, ends: dict[str, str]) -> None:
        self.ends, self.asked = ends, list[str]()

    def run(self, do: str, cell: Cell, log: Path, **paths: Path) -> tuple[str, float]:
        self.asked.append(do)
        if not self.ends[do]:
            found = {"seconds": {do: 1.0}, "refused": None}
            (paths["folder"] / f"{do}.json").write_text(json.dumps(found))
        return self.ends[do], 1.0


def run_one(cell: Cell, root: Path, pretended: Pretended) -> dict[str, Any]:
    (root / "models" / f"{cell.model}-{cell.seed}").mkdir(parents=True)
    made = false_alarms.Models(root / "models")
    return false_alarms.run_cell(cell, made, root, cast(false_alarms.Worker, pretended))


def test_a_part_that_was_finished_before_a_kill_is_not_run_again(
    tmp_path: Path, chosen: list[Cell]
) -> None:
    folder = tmp_path / chosen[0].key
    folder.mkdir()
    (folder / "compress.json").write_text('{"seconds": {"compress": 2.0}, "refused": null}')
    pretended = Pretended({"compress": "", "validate": ""})
    row = run_one(chosen[0], tmp_path, pretended)
    assert pretended.asked == ["validate"]
    assert row["stages"] == {"compress": 2.0, "validate": 1.0}


def test_a_part_that_dies_is_a_crash_of_its_cell(tmp_path: Path, chosen: list[Cell]) -> None:
    row = run_one(chosen[0], tmp_path, Pretended({"compress": "", "validate": "it ended with -11"}))
    assert (row["refused"]["kind"], row["refused"]["stage"]) == ("crash", "validate")
    assert row["refused"]["messages"] == ["it ended with -11"]
    assert not (tmp_path / chosen[0].key).exists()


def about() -> dict[str, Any]:
    machine = {"packages": {}, "cpu": "any", "flags": [], "cores": 1, "memory_mib": 1, "os": "any"}
    return {"machine": machine, "when": "today", "command": "it", "jobs": 1, "code": "none"}


def tiny_row(root: Path, chosen: list[Cell]) -> dict[str, Any]:
    """Make the row of a small BERT."""
    from optimizer.load.stage import run
    from optimizer.recipe.schema import Model

    cell = next(c for c in chosen if c.model == "bert" and c.dialect == "onnxruntime")
    cell = replace(
        cell, method="rtn", bias_correction=False, compress_threads=1, validate_threads=1
    )
    models.write_random(root / "model", 0, "bert", TINY)
    section = models.model_section("bert", str(root / "model"))
    (root / "source").mkdir()
    run(Model.model_validate(section), root / "source")
    folder = root / "run"
    folder.mkdir()
    compressed = worker.part("compress", cell, root / "source", folder, root / "graphs")
    assert compressed["refused"] is None
    proven = worker.part("validate", cell, root / "source", folder, root / "graphs")
    return {**proven, "cell": asdict(cell), "seconds": 1.0}
