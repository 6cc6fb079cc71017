"""Checkpoints made smaller, for the tests of reduce."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from optimizer.load.stage import STAGE as LOAD
from optimizer.recipe.data import Calibrate, DataSpec
from optimizer.recipe.reduce import Reduce
from optimizer.recipe.schema import Model, Reduction
from optimizer.reduce import stage
from tests.compress.checkpoints import write_albert
from tests.conftest import write_rows, write_tiny_bert
from tests.decoders import write_tiny_decoder
from tests.made_once import once

ENCODERS, DECODERS = ("bert", "albert"), ("llama", "qwen2", "gpt2", "opt")
TASKS = {"encoder": "sentence-embedding", "decoder": "text-generation"}


def write_model(kind: str, folder: Path, layers: int = 3) -> Path:
    """A small random model of an architecture, with heavy-tailed weights."""
    if kind == "bert":
        return write_tiny_bert(folder, layers=layers)
    if kind == "albert":
        return write_albert(folder)
    return write_tiny_decoder(folder, kind, layers=layers)


def loaded(kind: str, root: Path, layers: int = 3) -> Path:
    """Folder of load with a model of a family, and calibration rows next to it."""
    return _load(root, kind, layers) / "reference"


@once
def _load(root: Path, kind: str, layers: int) -> None:
    out = root / "reference"
    out.mkdir(parents=True)
    task = TASKS["encoder" if kind in ENCODERS else "decoder"]
    model = write_model(kind, root / "model", layers)
    LOAD.run(Model(source=str(model), task=task), out=out)
    write_rows(root / "reference.jsonl", 160, seed=1)


def copied(reference: Path, folder: Path) -> Path:
    """The reference with its calibration rows, free to be changed."""
    shutil.copytree(reference, folder)
    shutil.copyfile(reference.with_suffix(".jsonl"), folder.with_suffix(".jsonl"))
    return folder


def section(reference: Path, goal: dict[str, Any], **options: Any) -> Reduction:
    """goal and options as in a recipe's reduce section."""
    rows = DataSpec(source="json", files=(str(reference.with_suffix(".jsonl")),))
    chosen = Reduce.model_validate_json(json.dumps({"goal": goal, **options}))
    calibrate = Calibrate(data=rows, samples=48, sequence_length=32, batch_size=16)
    task = json.loads((reference / "contract.json").read_text())["task"]
    return Reduction(reduce=chosen, calibrate=calibrate if chosen.calibrated else None, task=task)


def reduced(reference: Path, out: Path, goal: dict[str, Any], **options: Any) -> Path:
    """The folder of the smaller model."""
    out.mkdir(parents=True, exist_ok=True)
    stage.run(section(reference, goal, **options), reference, out=out)
    return out
