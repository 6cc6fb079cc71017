"""What `plan` says of reduce before it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimizer.load.checkpoint import open_checkpoint
from optimizer.reduce.predicted import estimate, shapes
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
    assert shapes(chosen, of(reference)) == of(folder)


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
