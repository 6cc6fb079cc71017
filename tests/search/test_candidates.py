"""Candidates that a recipe admits, the recipe of each, and the split of the rows."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from optimizer.data.sample import Sample
from optimizer.foundation.errors import RecipeError
from optimizer.harness import tasks
from optimizer.harness.inputs.tensors import TensorRow
from optimizer.recipe import file as recipe_file
from optimizer.recipe.schema import Recipe
from optimizer.recipe.search import Budget
from optimizer.search import candidates, chosen_recipe
from optimizer.search.stages import split
from tests.conftest import write_tiny_recipe


def read(folder: Path, *overrides: str) -> Recipe:
    return recipe_file.read(write_tiny_recipe(folder, Path("model")), overrides)


def test_the_recipe_itself_comes_first_and_keeps_its_sections(tmp_path: Path) -> None:
    recipe = read(tmp_path, "search={}", "quantize.keep_float=[a.*]")
    first = candidates.derive_recipe(recipe, candidates.list_candidates(recipe)[0])
    assert first == recipe.model_copy(update={"search": None})


def test_the_timing_of_a_confirmation_takes_no_more_than_its_share_of_the_hours(
    tmp_path: Path,
) -> None:
    """The recipe that is found has the limit, too; that of the user's recipe is kept if lower."""
    hours = "search={over: {method: [rtn]}, budget: {hours: 0.1}}"
    recipe = read(tmp_path, hours, "validate.latency.max_seconds=300")
    first = candidates.derive_recipe(recipe, candidates.list_candidates(recipe)[0])
    assert first.validate_.latency.max_seconds == 360 / 8
    found = tmp_path / "found.yaml"
    chosen_recipe.write(tmp_path / "recipe.yaml", (), 0, first, found)
    assert recipe_file.read(found) == first
    recipe = read(tmp_path, hours, "validate.latency.max_seconds=7")
    first = candidates.derive_recipe(recipe, candidates.list_candidates(recipe)[0])
    assert first.validate_.latency.max_seconds == 7


def test_a_share_keeps_the_modules_float_beside_those_of_the_recipe(tmp_path: Path) -> None:
    recipe = read(tmp_path, "search={}", "quantize.keep_float=[a.*]")
    finer = next(c for c in candidates.list_candidates(recipe) if c.finer)
    made = candidates.derive_recipe(recipe, finer, ("b.c",)).quantize
    assert made.keep_float == ("a.*", "b.c")


def test_four_bits_are_kept_finer_as_eight(tmp_path: Path) -> None:
    weights = "quantize={weights: {bits: 4, granularity: group, group_size: 32}}"
    recipe = read(tmp_path, "search={}", weights)
    finer = next(c for c in candidates.list_candidates(recipe) if c.finer)
    (rule,) = candidates.derive_recipe(recipe, finer, ("b.c",)).quantize.layers
    assert (rule.modules, rule.weights.bits) == (("b.c",), 8)


@pytest.mark.parametrize(
    ("weights", "more"), [("{bits: 4, granularity: group, group_size: 32}", 4), ("{bits: 8}", 24)]
)
def test_a_limit_on_size_is_filled_and_not_passed(tmp_path: Path, weights: str, more: int) -> None:
    search = "search={over: {method: [rtn]}, objective: quality, constraints: {size_mb: 1}}"
    recipe = read(tmp_path, search, f"quantize={{weights: {weights}}}")
    space = candidates.list_candidates(recipe)
    *same, added = candidates.fill_limit(recipe, space, size=900_000, weights=500_000)
    assert same == space
    assert 900_000 + added.finer * 500_000 * more / 8 == pytest.approx(1e6)
    for size in (1_000_000, 100_000):  # no room, and room for more than the largest share
        assert candidates.fill_limit(recipe, space, size, weights=500_000) == space


def test_a_recipe_that_keeps_modules_by_itself_says_nothing_of_a_share_s_size(
    tmp_path: Path,
) -> None:
    """Candidates with a share drop keep_float_auto, so that they may be smaller."""
    search = "search={over: {method: [rtn]}, constraints: {size_mb: 1}}"
    recipe = read(tmp_path, search, "quantize.keep_float_auto={max_error: 0.01}")
    space = candidates.list_candidates(recipe)
    assert candidates.drops_choice(recipe.quantize)
    assert candidates.fill_limit(recipe, space, 900_000, 500_000) == space


@pytest.mark.parametrize(("group", "grows"), [(8, False), (16, True), (32, True)])
def test_eight_bits_take_more_than_four_where_scales_are_few(
    tmp_path: Path, group: int, grows: bool
) -> None:
    """Four bits and a scale of 4 bytes per 8 weights take 8 bits a weight, as int8 per channel."""
    weights = f"quantize={{weights: {{bits: 4, granularity: group, group_size: {group}}}}}"
    fewest, most = candidates.count_added_bytes(read(tmp_path, weights).quantize)
    assert (fewest > 0, most) == (grows, 0.5)


def test_a_size_replaces_the_goal_of_the_recipe_and_whole_models_alone_keep_modules(
    tmp_path: Path,
) -> None:
    sizes = "search={over: {method: [rtn], size: [1.0, 0.5]}}"
    recipe = read(tmp_path, sizes, "reduce={goal: {keep: 0.8}, methods: [ffn]}")
    space = candidates.list_candidates(recipe)
    made = {c.size: candidates.derive_recipe(recipe, c).reduce for c in space}
    assert (space[0].size, made[1.0]) == (0.8, None)
    assert (made[0.5].goal.keep, made[0.5].methods) == (0.5, ("ffn",))
    assert {c.size for c in space if c.finer} == {1.0}
    with pytest.raises(RecipeError, match="another goal"):
        read(tmp_path, sizes, "reduce={goal: {depth: 1}}")
    with pytest.raises(RecipeError, match=r"search\.over\.size"):
        read(tmp_path, "search={}", "reduce={goal: {keep: 0.8}}")


def test_another_method_loses_the_options_of_the_first(tmp_path: Path) -> None:
    gptq = "quantize={method: gptq, gptq: {damping: 0.02}, weights: {bits: 8}}"
    recipe = read(tmp_path, "search={over: {method: [rtn]}}", gptq)
    made = {
        c.methods: candidates.derive_recipe(recipe, c) for c in candidates.list_candidates(recipe)
    }
    assert made["rtn",].quantize.chosen[0].name == "rtn"
    assert made["gptq",].quantize.gptq.damping == 0.02


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ("{attention: [int8]}", "its attention runs in float"),
        ("{targets: [1]}", "target 1 does not exist"),
        ("{method: [scale_tuning]}", "scale_tuning: no target of this recipe admits it"),
        ("{method: [rtn, rtn]}", "method lists a value twice"),
        ("{size: [1.5]}", "search.over.size.0"),
    ],
)
def test_a_choice_that_nothing_admits_is_refused(tmp_path: Path, over: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        candidates.list_candidates(read(tmp_path, f"search={{over: {over}}}"))


def test_the_modules_of_a_share_gain_most_of_all_sets_of_their_size() -> None:
    errors = [3.0, 1.0, 2.0, 5.0, 4.0, 0.5]
    modules = {str(i): {"error": e, "weights": 10.0} for i, e in enumerate(errors)}
    kept = candidates.choose_kept_modules(modules, 0.5)
    best = max(combinations(modules, 3), key=lambda s: sum(modules[m]["error"] ** 2 for m in s))
    assert kept == best
    assert candidates.choose_kept_modules(modules, 0.0) == ()


@pytest.mark.parametrize(("trials", "share"), [(200, 5), (4, 4)])
def test_candidates_that_can_be_tried_share_a_quarter_of_the_time_for_timing(
    trials: int, share: int
) -> None:
    budget = Budget(hours=1, trials=trials)
    assert share * budget.find_seconds_of_timing(5) == pytest.approx(3600 / 4)


def test_the_split_depends_on_the_texts_alone() -> None:
    rows = [Sample(text=f"text {i % 40}", label=i) for i in range(80)]
    task = tasks.find_task("text-classification")
    search, held_out = (split.select_rows(part, rows, task) for part in ("search", "held_out"))
    assert len(search) == len(held_out) == 40
    assert not {r.text for r in search} & {r.text for r in held_out}
    again = split.select_rows("held_out", rows[::-1], task)
    assert [r.text for r in again] == [r.text for r in held_out]
    assert [r.label for r in search] != sorted(r.label or 0 for r in search)


def test_texts_that_differ_in_case_or_white_space_are_on_one_side() -> None:
    rows = [Sample(text=t.format(i)) for i in range(20) for t in ("text {}", " Text  {} ")]
    held_out = split.select_rows("held_out", rows, tasks.find_task("text-classification"))
    assert len(held_out) == 20
    assert len({" ".join(r.text.lower().split()) for r in held_out}) == 10


def test_rows_of_arrays_are_split_by_their_values() -> None:
    rows = [Sample(arrays=TensorRow({"x": np.full(2, i % 10)}), label=i) for i in range(40)]
    held_out = split.select_rows("held_out", rows, tasks.find_task("text-classification"))
    assert len(held_out) == 20
    assert len({r.arrays for r in held_out}) == 5


def test_questions_about_one_context_are_on_one_side() -> None:
    task = tasks.find_task("question-answering")
    rows = [Sample(text=f"question {i}", text_pair=f"context {i % 10}") for i in range(40)]
    search, held_out = (split.select_rows(part, rows, task) for part in ("search", "held_out"))
    assert len(search) == len(held_out) == 20
    assert not {r.text_pair for r in search} & {r.text_pair for r in held_out}


@pytest.mark.parametrize(("kind", "tried"), [("bert", {"float", "int8"}), ("resnet", {"float"})])
def test_int8_attention_is_tried_of_a_model_that_has_it(
    tmp_path: Path, kind: str, tried: set[str]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    (folder / "model.safetensors").touch()
    overrides = ("search={over: {method: [rtn]}}", "targets=[{runtime: openvino}]")
    recipe = recipe_file.read(write_tiny_recipe(tmp_path, folder), overrides)
    assert {c.attention for c in candidates.list_candidates(recipe)} == tried
