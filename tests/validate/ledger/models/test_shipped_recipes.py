"""The ledgers of the shipped recipes, on their real weights: clean runs raise nothing. Sizes are
small where they decide nothing: few and short calibration texts, MiniLM's first blocks, and of
SmolLM2 the first block and tokens. All six blocks of MiniLM: test_minilm.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from optimizer.data.datasets import read_samples
from optimizer.recipe import file as recipe_file
from optimizer.recipe.schema import Recipe
from optimizer.validate.ledger import ledger
from optimizer.validate.ledger.inputs import select_inputs
from optimizer.validate.materials import Materials
from tests import minilm as minilm_blocks
from tests.smollm2 import shortened
from tests.validate.runs import FOLDERS, Run, make

RECIPES = Path(__file__).parents[4] / "recipes"
TEXTS = 6


def proven(run: Run, made: Recipe) -> None:
    """Assert that no hop of the run's ledger refuses it, on a few of the recipe's own texts."""
    texts = select_inputs(read_samples(made.validate_.data))
    chosen = [t[:80] for t in texts[:: len(texts) // TEXTS]]
    entries = ledger.run(Materials(run.section, *(run.root / f for f in FOLDERS), texts=chosen))
    assert [(e.hop, e.problems) for e in entries if e.ok is False] == []
    assert len([e for e in entries if e.ok]) >= 6


@pytest.fixture(scope="module")
def minilm(minilm_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return minilm_blocks.shortened(tmp_path_factory.mktemp("minilm"), minilm_source)


@pytest.mark.parametrize(
    "runtime", ["onnxruntime", pytest.param("tensorrt-rtx", marks=pytest.mark.slow)]
)
def test_minilm_int8(runtime: str, minilm: Path, tmp_path: Path) -> None:
    if runtime == "tensorrt-rtx":
        pytest.importorskip("tensorrt_rtx", reason="pip install tensorrt-rtx")
    few = ["calibrate.samples=16", "calibrate.sequence_length=32", f"model.source={minilm}"]
    made = recipe_file.read(RECIPES / "minilm-int8.yaml", few)
    (target,) = (t for t in made.targets if t.runtime == runtime)
    proven(make(tmp_path, made.model_copy(update={"targets": (target,)})), made)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shortened(tmp_path_factory.mktemp("smollm2"), blocks=1)


@pytest.mark.parametrize(
    "name", [pytest.param("smollm2-int8", marks=pytest.mark.slow), "smollm2-int4"]
)
def test_smollm2(name: str, smollm2: Path, tmp_path: Path) -> None:
    few = ["calibrate.samples=4", "calibrate.sequence_length=64", f"model.source={smollm2}"]
    made = recipe_file.read(RECIPES / f"{name}.yaml", few)
    proven(make(tmp_path, made), made)
