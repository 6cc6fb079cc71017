"""The first blocks of the real all-MiniLM-L6-v2: all six take three times as long."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from tests.made_once import once

BLOCKS = 2


@once
def shortened(folder: Path, source: Path) -> Path:
    """The folder, with the model of `source` in it, cut behind its first blocks."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": BLOCKS}))
    tensors = load_file(folder / "model.safetensors")
    later = tuple(f"encoder.layer.{i}." for i in range(BLOCKS, config["num_hidden_layers"]))
    first = {name: t for name, t in tensors.items() if not name.startswith(later)}
    save_file(first, folder / "model.safetensors", {"format": "pt"})
    return folder
