"""Golden files of two small models, as every stage writes them.

A move or a rename in the code must not change a byte of them.

    <model>/checkpoint/     a random model, its tokenizer included
    <model>/state/          a compressed state with ranges, factors and replaced parameters
    <model>/expected/       contract.json; names.json, lowering.json and model.onnx of each target;
                            state.json and tensors.safetensors of plain rounding

The checkpoint and the state are inputs: on another processor random numbers and sums differ in
their last bits. `python -m tests.golden.bundle` writes all of it again; do that only where the
formats are meant to change, and say so in the commit.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from optimizer.compress.stage import STAGE as COMPRESS
from optimizer.export.stage import STAGE as EXPORT
from optimizer.load.stage import STAGE as LOAD
from optimizer.lower.stage import STAGE as LOWER
from optimizer.recipe.schema import Recipe

HERE = Path(__file__).parent
TASKS = {"encoder": "sentence-embedding", "decoder": "text-generation"}
TARGETS: dict[str, tuple[dict[str, Any], ...]] = {
    "encoder": (
        {"runtime": "onnxruntime"},
        {"runtime": "tensorrt-rtx", "float": "fp32", "shapes": {"sequence": (4, 16, 64)}},
    ),
    "decoder": ({"runtime": "onnxruntime"},),
}
ROUNDED = {"weights": {"bits": 4, "granularity": "group", "group_size": 32}}
KEPT = {
    "encoder": {
        "method": "smoothquant",
        "activations": {"range": "mse"},
        "bias_correction": True,
    },
    "decoder": {
        **ROUNDED,
        "method": "gptq",
        "head": {"bits": 8, "granularity": "group", "group_size": 32},
    },
}


def recipe(model: str, quantize: dict[str, Any]) -> Recipe:
    rows = {"source": "json", "files": (str(HERE / "texts.jsonl"),), "columns": {"text": "text"}}
    document = {
        "name": model,
        "model": {"source": str(HERE / model / "checkpoint"), "task": TASKS[model]},
        "quantize": quantize,
        "targets": TARGETS[model],
        "validate": {
            "data": rows,
            "metric": "perplexity" if model == "decoder" else "cosine",
            "max_drop": 0.5,
            "latency": {"data": rows, "sequence": (16,), "must_beat_float": False},
        },
    }
    if "method" in quantize:
        document["calibrate"] = {"data": rows, "samples": 8, "sequence_length": 32}
    return Recipe.model_validate(document)


def write(model: str, out: Path, work: Path) -> None:
    """Write the files of expected/ from the checkpoint and the state of the model."""
    made = recipe(model, ROUNDED)
    source, rounded, state = work / "source", work / "rounded", HERE / model / "state"
    for folder in (source, rounded, out):
        folder.mkdir(parents=True)
    LOAD.run(made.model, out=source)
    shutil.copy(source / "contract.json", out)
    COMPRESS.run(made.compression, source, out=rounded)
    for name in ("state.json", "tensors.safetensors"):
        shutil.copy(rounded / name, out)
    for target in made.targets:
        graph, model_folder = work / f"graph {target.runtime}", out / target.runtime
        graph.mkdir()
        model_folder.mkdir()
        EXPORT.run(target.export, source, state, out=graph)
        LOWER.run(target, source, state, graph, out=model_folder)
        shutil.copy(graph / "names.json", model_folder)


def main() -> None:
    """Write every input and everything expected of it again."""
    from tests.conftest import write_rows, write_tiny_bert
    from tests.decoders import write_tiny_decoder

    write_rows(HERE / "texts.jsonl", 12, seed=1)
    for model in TASKS:
        shutil.rmtree(HERE / model, ignore_errors=True)
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            write_model = write_tiny_bert if model == "encoder" else write_tiny_decoder
            write_model(HERE / model / "checkpoint")
            made = recipe(model, KEPT[model])
            (work / "loaded").mkdir()
            (HERE / model / "state").mkdir()
            LOAD.run(made.model, out=work / "loaded")
            COMPRESS.run(made.compression, work / "loaded", out=HERE / model / "state")
            write(model, HERE / model / "expected", work)


if __name__ == "__main__":
    sys.exit(main())
