"""Tiny causal language models compressed: loaded folders, sections, errors of what comes out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from optimizer.compress import stage
from optimizer.compress.simulate import simulate_state
from optimizer.foundation import state as states
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model
from optimizer.recipe.schema import Calibrate, Compress, Compression, DataSpec, Quantize
from tests.compress.checkpoints import load
from tests.conftest import sentences, write_rows

GROUPS = {"bits": 4, "granularity": "group", "group_size": 32}
TASK = "text-generation"
LENGTH = 32


def loaded(model: Path, out: Path) -> Path:
    """Run the load stage, and put calibration text for 40 windows beside its output."""
    source = load(model, out, TASK)
    write_rows(out.with_suffix(".jsonl"), 120, seed=1)
    return source


def section(source: Path, memory_gb: float = 4.0, **quantize: Any) -> Compression:
    rows = DataSpec(source="json", files=(str(source.with_suffix(".jsonl")),))
    return Compression(
        calibrate=Calibrate(data=rows, samples=40, sequence_length=LENGTH, batch_size=4),
        quantize=Quantize.model_validate_json(json.dumps({"weights": GROUPS, **quantize})),
        task=TASK,
        compress=Compress(memory_gb=memory_gb),
    )


def compress(source: Path, out: Path, **quantize: Any) -> states.CompressedState:
    out.mkdir()
    stage.run(section(source, **quantize), source, out=out)
    return states.read(out)


def logits(source: Path, state: states.CompressedState | None) -> torch.Tensor:
    model = load_torch_model(open_checkpoint(source), TASK)
    if state is not None:
        model = simulate_state(model, state)
    tokenizer = Tokenizer.from_file(str(source / "checkpoint" / "tokenizer.json"))
    tokens = tokenizer.encode(" ".join(sentences(40, seed=9))).ids
    ids = torch.tensor(tokens[: 8 * LENGTH]).reshape(8, LENGTH)
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


def error(source: Path, state: states.CompressedState) -> float:
    exact = logits(source, None)
    return float((logits(source, state) - exact).norm() / exact.norm())
