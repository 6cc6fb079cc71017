"""Checkpoints and recipes' sections for the tests of compress."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from optimizer.compress import stage
from optimizer.load.stage import STAGE as LOAD
from optimizer.recipe.schema import Activations, Calibrate, Compression, DataSpec, Model, Quantize
from tests.conftest import write_rows, write_tokenizer

W8A8 = {"activations": Activations()}


def load(model: Path, out: Path, task: str = "sentence-embedding") -> Path:
    """Run the load stage on a folder, and put calibration rows beside its output."""
    out.mkdir(parents=True)
    LOAD.run(Model(source=str(model), task=task), out=out)  # type: ignore[arg-type]
    write_rows(out.with_suffix(".jsonl"), 12, seed=1)
    return out


def section(source: Path, data: bool = True, batch_size: int = 4, **quantize: Any) -> Compression:
    rows = DataSpec(source="json", files=(str(source.with_suffix(".jsonl")),))
    calibrate = Calibrate(data=rows, samples=12, sequence_length=32, batch_size=batch_size)
    return Compression(
        calibrate=calibrate if data else None,
        quantize=Quantize(**quantize),
        task=json.loads((source / "contract.json").read_text())["task"],
    )


def compress(source: Path, out: Path, **options: Any) -> Path:
    """Run the stage into a new folder."""
    out.mkdir()
    stage.run(section(source, **options), source, out=out)
    return out


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def modules(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["module"]: row for row in json.loads((folder / "modules.json").read_text())}


def write_albert(folder: Path, layers: int = 3) -> Path:
    """A random ALBERT: one block of weights, applied `layers` times."""
    import torch
    from transformers import AlbertConfig, AlbertModel

    from tests.conftest import heavy_tailed

    folder.mkdir(parents=True)
    model = AlbertModel(
        AlbertConfig(
            vocab_size=write_tokenizer(folder),
            embedding_size=16,
            hidden_size=32,
            num_hidden_layers=layers,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=64,
        )
    )
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.copy_(heavy_tailed(tuple(parameter.shape), i, 0.2))
    model.save_pretrained(folder)
    return folder
