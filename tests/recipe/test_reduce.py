"""A reduce section asks for one goal, and every option it names is used."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimizer.foundation.errors import RecipeError
from optimizer.recipe.schema import Recipe
from tests.recipe.test_file import GOOD, read

BARE = GOOD.replace("calibrate:\n  data: {source: text, files: [a.txt]}\n", "").replace(
    "  activations: {range: mse}\n", ""
)


def reduced(tmp_path: Path, section: str, text: str = GOOD) -> Recipe:
    return read(tmp_path, text.replace("quantize:\n", f"reduce: {{{section}}}\nquantize:\n"))


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("goal: {}", "reduce.goal: nothing was found; accepted: exactly one of"),
        ("goal: {keep: 0.5, depth: 3}", "keep and depth was found"),
        ("goal: {latency_gain: 1.0}", "reduce.goal.latency_gain: 1.0 was found"),
        ("goal: {latency_gain: 1.6, keep: 0.5}", "keep and latency_gain was found"),
        ("goal: {latency_gain: 1.6}, measure_on: 2", "target 2 does not exist; targets has 0 ("),
        ("goal: {keep: 0.5}, measure_on: 0", "measure_on applies to goal.latency_gain"),
        ("goal: {keep: 0.5}, gain_tolerance: 0.1", "gain_tolerance applies to goal.latency_gain"),
        ("goal: {keep: 0.5}, gain_over: float", "gain_over applies to goal.latency_gain"),
        ("goal: {keep: 1.5}", "reduce.goal.keep: 1.5 was found"),
        ("goal: {depth: 3}, methods: [width, depth]", "goal.depth sets only the number of blocks"),
        ("goal: {depth: 3}, importance: fisher", "importance applies to neurons and heads"),
        ("goal: {keep: 0.5}, depth_samples: 8", "depth_samples applies to method depth"),
        ("goal: {keep: 0.5}, methods: [width, ffn]", "ffn is listed twice"),
        ("goal: {keep: 0.5}, importance: size", "second_order"),
        ("recover: {}", "reduce: neither was found; accepted: either goal or student"),
        ("goal: {keep: 0.5}, student: a, recover: {}", "both was found"),
        ("student: a, methods: [ffn], recover: {}", "methods: belongs to a goal"),
        ("student: a", "reduce.recover is missing"),
        ("student: {source: a, seeds: 1}, recover: {}", "unknown key"),
    ],
)
def test_what_cannot_be_meant_is_refused(section: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as refused:
        reduced(tmp_path, section)
    assert message in str(refused.value)


def test_text_is_needed_where_something_is_chosen_by_it(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="calibrate is missing"):
        reduced(tmp_path, "goal: {keep: 0.5}", BARE)
    chosen = reduced(tmp_path, "goal: {keep: 0.5}, importance: magnitude", BARE)
    assert chosen.reduction is not None
    assert chosen.reduction.calibrate is None


def test_its_own_text_comes_before_the_recipe_s(tmp_path: Path) -> None:
    own = "calibrate: {data: {source: text, files: [c.txt]}}"
    chosen = reduced(tmp_path, f"goal: {{keep: 0.5}}, {own}").reduction
    assert chosen is not None
    assert chosen.calibrate is not None
    assert chosen.calibrate.data.files == ("c.txt",)


@pytest.mark.parametrize(
    ("section", "methods"),
    [("goal: {keep: 0.5}", ("width",)), ("goal: {depth: 3}", ("depth",))],
)
def test_methods_follow_from_the_goal_when_absent(
    section: str, methods: tuple[str, ...], tmp_path: Path
) -> None:
    chosen = reduced(tmp_path, section).reduce
    assert chosen is not None
    assert chosen.chosen == methods


def test_a_student_is_a_name_or_a_section(tmp_path: Path) -> None:
    one = reduced(tmp_path, "student: tiny/bert, recover: {}").reduction
    other = reduced(tmp_path, "student: {source: tiny/bert}, recover: {}").reduction
    assert one is not None
    assert one == other
    assert one.calibrate is None


UNTIMED = "{runtime: compressed-tensors}"


@pytest.mark.parametrize(
    ("targets", "accepted"),
    [
        (f"  - {UNTIMED}\n  - {{runtime: onnxruntime, device: cpu}}\n", "1 (onnxruntime-cpu)"),
        (f"  - {UNTIMED}\n", "add a target of onnxruntime"),
    ],
)
def test_a_gain_is_measured_only_on_a_target_that_is_timed(
    targets: str, accepted: str, tmp_path: Path
) -> None:
    listed = GOOD[GOOD.index("targets:\n") : GOOD.index("validate:")]
    text = GOOD.replace(listed, f"targets:\n{targets}")
    with pytest.raises(RecipeError, match="which is not timed: vLLM serves it") as refused:
        reduced(tmp_path, "goal: {latency_gain: 1.6}", text)
    assert accepted in str(refused.value)


def test_what_is_timed_has_the_form_of_the_recipe_and_costs_little(tmp_path: Path) -> None:
    """Methods that choose integers are left out; those that add to a graph stay."""
    text = GOOD.replace("quantize:\n", "quantize:\n  methods: [smoothquant, gptq]\n")
    recipe = reduced(tmp_path, "goal: {latency_gain: 1.6}, importance: fisher", text)
    timed = recipe.latencies
    assert timed is not None
    plain, whole = timed.compression, recipe.compression
    assert [m.name for m in plain.quantize.chosen] == ["smoothquant"]
    assert plain.quantize.weights == whole.quantize.weights
    assert plain.quantize.activations == whole.quantize.activations
    assert plain.calibrate is not None
    assert plain.calibrate.samples == 8
    assert timed.reduce.importance == "second_order"  # the default: it changes no size
