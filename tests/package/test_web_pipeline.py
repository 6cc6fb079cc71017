"""A recipe's whole way to a page: what node answers, under the limit that the ledger measured."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from optimizer import pipeline
from optimizer.foundation.errors import MachineError
from optimizer.harness.bundle.bundle import Bundle
from optimizer.recipe import file as recipe_file
from optimizer.store import Store
from tests.conftest import write_tiny_recipe
from tests.package.test_web_page import asked

TEXTS = ["the film was good", "a very bad place, and the staff of it was not nice"]
WEIGHTS = {
    "static": ("", "activations: {range: minmax}"),
    "per token": ("", "activations: {granularity: token}"),
    "int8 alone": ("", ""),
    "int4 alone": ("weights: {bits: 4, granularity: group, group_size: 32}", ""),
}


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
@pytest.mark.parametrize("name", WEIGHTS)
def test_node_answers_within_the_limit_of_the_ledger(
    name: str, tiny_bert: Path, tmp_path: Path
) -> None:
    file = write_tiny_recipe(tmp_path / "recipe", tiny_bert)
    head, tail = file.read_text().split("targets:\n", 1)
    weights, activations = WEIGHTS[name]
    lines = []
    for line in head.splitlines():
        if line.startswith("  activations:"):
            line = f"  {activations}" if activations else ""
        if line.startswith("  weights:") and weights:
            line = f"  {weights}"
        lines.append(line)
    targets = "targets:\n  - {runtime: onnxruntime}\n  - {runtime: onnxruntime-web}\n"
    file.write_text("\n".join(lines) + "\n" + targets + tail[tail.index("validate:") :])
    try:
        outcome = pipeline.run(recipe_file.read(file), Store(tmp_path / "store"))
    except MachineError as e:
        pytest.skip(f"no npm registry: {e}")
    assert outcome.bundle is not None
    bundle = Path(shutil.copytree(outcome.bundle.path / "bundle", tmp_path / "bundle"))
    document = json.loads((bundle / "web" / "bundle.json").read_text())
    with Bundle(bundle, threads=1, runtime="onnxruntime") as opened:
        expected = opened.predict(TEXTS, batch_size=1)
    for one, other in zip(asked(bundle, TEXTS), expected, strict=True):
        ours, theirs = np.array(one["answer"]["embedding"]), np.array(other["embedding"])
        assert np.linalg.norm(ours - theirs) <= document["models"]["quantized"]["limit"]
