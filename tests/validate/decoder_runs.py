"""Runs of the stages on small random decoders, to be proven or damaged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizer.recipe.schema import Recipe
from optimizer.validate.materials import Materials
from tests.conftest import sentences, write_rows
from tests.validate.runs import FOLDERS, Run, make

INT4 = {"bits": 4, "granularity": "group", "group_size": 32}
INT8 = {**INT4, "bits": 8}
SCHEMES: dict[str, dict[str, Any]] = {
    "rtn": {"weights": INT4},
    "gptq": {"method": "gptq", "weights": INT4, "head": INT8},
    "token": {"activations": {"granularity": "token"}},
    "static": {"activations": {"range": "minmax"}},
    "fused": {"weights": INT4, "head": INT8, "embedding": INT8},
}
"""All but the last keep their attentions in plain operators, and head and embedding in float."""


@dataclass(frozen=True)
class DecoderRun(Run):
    """A run whose ledger uses a few short texts."""

    def materials(self, bundle: Path | None = None) -> Materials:
        texts = sentences(8, seed=9)
        return Materials(
            self.section, *(self.root / f for f in FOLDERS), texts=texts, bundle=bundle
        )


def decoder_recipe(
    model: str, data: Path, quantize: dict[str, Any], fused: bool = False, **validate: Any
) -> Recipe:
    """A recipe on texts written to `data`, with budgets that a tiny random model keeps.

    fused: attentions become ONNX Runtime's own operator.
    """
    for name, count, seed in (("calibrate", 40, 1), ("evaluate", 120, 2), ("time", 8, 3)):
        write_rows(data / f"{name}.jsonl", count, seed)

    def rows(name: str) -> dict[str, Any]:
        files = (str(data / f"{name}.jsonl"),)
        return {"source": "json", "files": files, "columns": {"text": "text"}}

    document = {
        "name": "tiny",
        "model": {"source": model, "task": "text-generation"},
        "calibrate": {"data": rows("calibrate"), "samples": 16, "sequence_length": 32},
        "quantize": quantize,
        "targets": ({"runtime": "onnxruntime", "threads": 1, "fuse_attention": fused},),
        "validate": {
            "data": rows("evaluate"),
            "metric": "perplexity",
            "max_drop": 0.5,
            "sequence_length": 48,
            "quantization_budget": 0.9,
            "latency": {
                "data": rows("time"),
                "sequence": (16,),
                "iterations": 5,
                "new_tokens": 4,
                "must_beat_float": False,
            },
            **validate,
        },
    }
    return Recipe.model_validate(document)


def make_decoder(root: Path, made: Recipe, exported: Run | None = None) -> DecoderRun:
    """Every stage up to validate; `exported`: a run with the same float graph."""
    run = make(root, made, exported)
    return DecoderRun(run.root, run.section)
