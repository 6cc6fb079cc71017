"""Pieces of a graph compute what the whole computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from optimizer.foundation.errors import OptimizeError
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.lower.onnx import cut
from optimizer.lower.onnx.cut import Edge
from optimizer.validate.ledger.pieces.layout import place_output
from tests.validate.runs import SCHEMES, Run


@pytest.mark.parametrize("scheme", SCHEMES)
def test_modules_and_rest_together_are_the_whole(
    runs: dict[str, Run], tmp_path: Path, scheme: str
) -> None:
    """Alternating between the two pieces until nothing is missing ends in the same answer."""
    materials = runs[scheme].materials()
    model = runs[scheme].folder("model") / "model.onnx"
    at = cut.list_edges(model, materials.modules)
    assert {e.module for e in at} == set(materials.modules)
    cut.write_products(
        model, [replace(e, integers="", step="") for e in at], tmp_path / "modules.onnx"
    )
    cut.write_rest(model, at, tmp_path / "rest.onnx")
    batch = dict(materials.batches[1])
    shape = batch["input_ids"].shape
    with (
        OrtRunner(model, threads=1, fuse=False) as whole,
        OrtRunner(tmp_path / "modules.onnx", threads=1, fuse=False) as modules,
        OrtRunner(tmp_path / "rest.onnx", threads=1, fuse=False) as rest,
    ):
        widths = {e.output: materials.float_model.get_submodule(e.module).out_features for e in at}
        known = {
            e.output: place_output(np.zeros((*shape, widths[e.output]), np.float32), e) for e in at
        }
        for _ in range(2 * 4 + 1):  # two layers, four modules deep each
            found = rest.infer({**batch, **known})
            known = modules.infer({e.input: found[e.input] for e in at})
        for name, value in whole.infer(batch).items():
            np.testing.assert_array_equal(found[name], value)


def test_a_module_the_graph_does_not_have_is_named(runs: dict[str, Run]) -> None:
    with pytest.raises(OptimizeError, match="nowhere has no product"):
        cut.list_edges(runs["w8"].folder("model") / "model.onnx", ["nowhere"])


def test_modules_that_follow_each_other_directly_are_run_apart() -> None:
    """The first one's output, given to the second, would answer for the first."""
    edges = [Edge(m, i, o, 3, 3) for m, i, o in (("a", "x", "h"), ("b", "h", "y"), ("c", "x", "z"))]
    assert [[e.module for e in part] for part in cut.split(edges)] == [["a", "c"], ["b"]]
