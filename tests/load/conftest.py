"""Running the load stage on changed copies of the tiny models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from optimizer.load.stage import STAGE
from optimizer.recipe.schema import Model

Load = Callable[..., Path]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """load(source, task, **section) -> the stage's folder."""

    def run(source: Path | str, task: str = "sentence-embedding", **section: Any) -> Path:
        out = tmp_path / "loaded"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        STAGE.run(Model(source=str(source), task=task, **section), out=out)  # type: ignore[arg-type]
        return out

    return run


@pytest.fixture
def bert(tiny_bert: Path, tmp_path: Path) -> Path:
    """A copy of the tiny encoder that a test may damage."""
    return Path(shutil.copytree(tiny_bert, tmp_path / "bert"))


def edit_json(file: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    document = json.loads(file.read_text()) if file.is_file() else {}
    document.update(changes)
    file.write_text(json.dumps({k: v for k, v in document.items() if v is not None}))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Rewrite model.safetensors after `change` has edited its dict."""
    file = folder / "model.safetensors"
    tensors = {name: t.clone() for name, t in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)
