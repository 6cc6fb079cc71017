"""Predictions of `plan` about reduce."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.reduce.predicted import estimate, predict_shapes, write_remark
from tests.reduce.smaller import loaded, reduced, section


def of(folder: Path) -> dict[str, tuple[int, ...]]:
    checkpoint = open_checkpoint(folder)
    return {name: checkpoint.shape(name) for name in checkpoint.tensors}


@pytest.mark.parametrize("kind", ["bert", "albert", "gpt2", "llama"])
def test_the_smaller_model_s_shapes_are_known_beforehand(kind: str, tmp_path: Path) -> None:
    reference = loaded(kind, tmp_path)
    methods = ["ffn"] if kind == "albert" else ["ffn", "depth"]
    chosen = section(reference, {"keep": 0.7}, methods=methods, importance="activations")
    folder = reduced(
        reference, tmp_path / "out", {"keep": 0.7}, methods=methods, importance="activations"
    )
    assert predict_shapes(chosen, of(reference)) == of(folder)


def test_a_smaller_goal_is_predicted_to_write_less(tmp_path: Path) -> None:
    reference = of(loaded("bert", tmp_path))
    folder = tmp_path / "reference"
    wide, narrow = (
        estimate(section(folder, {"keep": keep}, importance="magnitude"), reference)
        for keep in (0.9, 0.6)
    )
    assert narrow.disk < wide.disk
    solved = estimate(section(folder, {"keep": 0.9}), reference)
    assert solved.memory > wide.memory


@pytest.mark.parametrize(
    ("methods", "importance", "compares"),
    [
        (["ffn", "depth"], "second_order", True),
        (["width"], "second_order", True),  # heads of a llama
        (["ffn"], "second_order", False),
        (["depth"], None, False),
        (["width"], "magnitude", False),  # no text to compare on
    ],
)
def test_candidates_are_predicted_where_sizes_can_be_compared(
    methods: list[str], importance: str | None, compares: bool, tmp_path: Path
) -> None:
    """Each is made, and then what is kept: five times the work of a size that is known."""
    reference = of(loaded("llama", tmp_path))
    options = {"methods": methods} | ({"importance": importance} if importance else {})
    wanted, known = (
        section(tmp_path / "reference", goal, **options)
        for goal in ({"latency_gain": 1.5}, {"keep": 1.0})
    )
    work, once = (estimate(s, reference).seconds - 5 for s in (wanted, known))
    assert work == pytest.approx((5 if compares else 1) * once)
    assert ("sizes that are compared" in write_remark(wanted)) is compares
    assert write_remark(known) == ""
