"""A search by the times of another machine finds that machine's fastest candidate."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optimizer.foundation.errors import DataError, RecipeError
from optimizer.recipe import file as recipe_file
from optimizer.search import kernel_times, search
from optimizer.search.kernel_times import KernelTimes
from optimizer.search.workbench import Workbench
from tests.conftest import write_rows, write_tiny_recipe

SECTION = "search: {over: {method: [rtn]}, objective: latency, budget: {trials: 2}}\n"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory, tiny_bert: Path) -> Path:
    file = write_tiny_recipe(tmp_path_factory.mktemp("recipe"), tiny_bert)
    write_rows(file.with_name("evaluate.jsonl"), 110, seed=2)
    file.write_text(
        file.read_text().replace("max_drop: 0.1", "max_drop: 0.1\n  ledger: end_to_end") + SECTION
    )
    return file


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def table(recipe: Path, store: Path) -> dict[str, Any]:
    return kernel_times.measure(recipe_file.read(recipe), store, 0.2, None)


def test_two_machines_find_the_optimum_of_each(
    recipe: Path, store: Path, table: dict[str, Any], tmp_path: Path
) -> None:
    """On one machine integers are faster than float, on the other slower."""
    names = {one["module"] for one in table["float"]["modules"]}
    chosen = {}
    for machine, full in (("integer", 2.0), ("float", 0.5)):
        for part, ms in (("modules", 1.0), ("float", full)):
            table[part]["modules"] = [{"module": name, "ms": ms} for name in names]
        table["cells"][0] |= {"p50": 8.0, "forward_p50": 4.0}
        file = tmp_path / f"{machine}.json"
        file.write_text(json.dumps(table))
        result = search.run(recipe_file.read(recipe), store, times=(file, None))
        assert result.exit_code == 0
        assert result.winner is not None
        assert str(file) in result.times
        chosen[machine] = result.winner
    assert chosen["integer"].candidate.finer == 0
    assert chosen["float"].candidate.finer > 0
    assert chosen["float"].ratio == 1 - 0.5 * 0.5 * len(chosen["float"].kept) / len(names)


def test_the_table_of_another_recipe_or_of_a_bundle_is_refused(
    recipe: Path, store: Path, table: dict[str, Any], tmp_path: Path
) -> None:
    first = search.candidates.list_candidates(recipe_file.read(recipe))[0]
    built = Workbench(recipe_file.read(recipe), store, first).build(first)
    file = tmp_path / "table.json"
    for change, named in (
        ({"form": {**table["form"], "cell": [8, 16]}}, "another cell"),
        ({"form": None}, "another target, quantize, checkpoint, cell"),
        ({"float": {"modules": [{"module": "a", "ms": float("nan")}]}}, "module a takes nan ms"),
    ):
        file.write_text(json.dumps(table | change))
        with pytest.raises(DataError, match=named):
            kernel_times.read(file, None, built)


def test_a_gate_that_needs_times_of_this_machine_is_refused(recipe: Path) -> None:
    beats = recipe_file.read(recipe, ["validate.latency.must_beat_float=true"])
    with pytest.raises(RecipeError, match="times of this machine"):
        kernel_times.check_recipe(beats)


def test_an_objective_with_another_batch_than_the_tables_is_refused(recipe: Path) -> None:
    rate = ["search.objective=throughput"]
    kernel_times.check_recipe(recipe_file.read(recipe, rate))
    with pytest.raises(RecipeError, match="a table has that of batch 1"):
        kernel_times.check_recipe(recipe_file.read(recipe, [*rate, "validate.latency.batch=[1,4]"]))


def test_a_module_without_a_time_is_named() -> None:
    times = KernelTimes("table.json", "cpu", 8.0, 4.0, {"a": 1.0, "b": 1.0}, {"a": 3.0})
    assert times.figures(["a"])["p50"] == 12.0
    with pytest.raises(DataError, match="no time of module b"):
        times.figures(["a", "b"])
