"""Learned rounding with quantized inputs through the ledger: correct runs on texts and images
pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from optimizer.foundation.state import CompressedState
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.validate.ledger import hops, ledger
from tests.validate import runs
from tests.validate.ledger.faults.mutations import edit_state
from tests.validate.ledger.models.test_images import materials, refused
from tests.vision import recipe

LEARNED: dict[str, Any] = {"autoround": {"steps": 12}}
STATIC, TOKEN = {"range": "minmax"}, {"granularity": "token"}
METHODS = {
    "static": {"methods": ("autoround",), "activations": STATIC},
    "each token": {"methods": ("autoround",), "activations": TOKEN},
    "behind factors": {"methods": ("smoothquant", "autoround"), "activations": STATIC},
}


@pytest.mark.parametrize("options", METHODS.values(), ids=METHODS.keys())
def test_a_correct_run_on_texts_passes(
    tiny_bert: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    asked = runs.recipe(str(tiny_bert), tmp_path, {**LEARNED, **options}, "sentence-embedding")
    run = runs.make(tmp_path / "run", asked)
    entries = ledger.run(run.materials())
    assert [e.hop for e in entries if e.ok is False] == []
    assert "learned: " in (run.folder("state") / "modules.json").read_text()


def test_a_norm_weight_that_moved_beside_quantized_inputs_was_not_learned(
    tiny_bert: Path, tmp_path: Path
) -> None:
    options = {**LEARNED, **METHODS["behind factors"], "strength": 0.5}
    asked = runs.recipe(str(tiny_bert), tmp_path, options, "sentence-embedding")
    run = runs.make(tmp_path / "run", asked)

    def moved(state: CompressedState) -> CompressedState:
        name = "encoder.layer.0.output.LayerNorm.weight"
        value = open_checkpoint(run.folder("source")).tensors[name] * 1.002
        return replace(state, replaced={**state.replaced, name: value})

    edit_state(moved)(run)
    assert hops.fold(run.materials()).ok is False


@pytest.mark.parametrize("kind", ["vit", "regnet"])
def test_a_correct_run_on_images_passes(tmp_path: Path, kind: str) -> None:
    made = recipe(tmp_path, kind, {**LEARNED, **METHODS["static"]})
    assert refused(ledger.run(materials(runs.make(tmp_path / "run", made)))) == []
