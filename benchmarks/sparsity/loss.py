"""Loss of a small language model with half of its linear weights pruned, by method.

    python -m benchmarks.sparsity.loss --out artifacts/sparsity --sequences ../shared/quality
    # a first look
    python -m benchmarks.sparsity.loss --only "sparsegpt 2:4;wanda 2:4" --windows 24

Model, windows, metrics and flags are those of llm_int4.py: SmolLM2-135M-Instruct, embeddings and
head dense and float, 32 windows of 512 tokens, dNLL in nats per token above the float model on
other documents. "in sequence": a first walk's pruned float weights are written as a checkpoint, and
a second walk quantizes them; the zeros stay. Rows "llm-compressor ..." need --peer, the Python of
an environment with llmcompressor, and have the same metrics on the checkpoint that it writes.

Each row runs in a process of its own; finished ones are kept in --out and not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.decoders import llm_int4

ROOT = Path(__file__).resolve().parents[2]
PATTERNS = {
    "50 %": {"pattern": "unstructured", "amount": 0.5},
    "2:4": {"pattern": "2:4"},
}
FLOAT: dict[str, Any] = {"method": "float_weights"}
G64 = {"methods": ["gptq"], "weights": llm_int4.G64}
METHODS: dict[str, dict[str, Any]] = {
    f"{method} {name}": {"sparsity": {"method": method, **pattern}, "quantize": FLOAT}
    for name, pattern in PATTERNS.items()
    for method in ("magnitude", "wanda", "sparsegpt")
}
METHODS |= {
    f"sparsegpt {name}, as published": {
        "sparsity": {
            "method": "sparsegpt",
            "sparsegpt": {"float_target": False, "sweeps": 0},
            **pattern,
        },
        "quantize": FLOAT,
    }
    for name, pattern in PATTERNS.items()
}
METHODS |= {  # llm-compressor multiplies in float32
    f"wanda {name}, fp32": {
        "sparsity": {"method": "wanda", **pattern},
        "quantize": FLOAT,
        "precision": "fp32",
    }
    for name, pattern in PATTERNS.items()
}
METHODS |= {
    "2:4 + INT4 g64, one walk": {"sparsity": {"method": "sparsegpt"}, "quantize": G64},
    "2:4 + INT4 g64, in sequence": {
        "after": "sparsegpt 2:4",
        "sparsity": {"method": "magnitude"},
        "quantize": G64,
    },
}
PEERS = {
    f"llm-compressor {method} {name}": {"peer": method, **pattern}
    for name, pattern in PATTERNS.items()
    for method in ("SparseGPT", "Wanda")
}
NOTE = """# SmolLM2-135M, half of its linear weights zero

dNLL: nats per token above the float model; KL from the float model; top-1: share of equal next
tokens; all on documents that calibration did not see. CPU seconds: of the walk, one thread.
Embeddings and head dense and float, 32 windows of 512 tokens. "as published": no float target and
no improvement of the mask; what is left still gets its least-squares values. Products in bf16
where no fp32 is written. Written by `benchmarks/sparsity/loss.py`.
"""


def work(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one row in this process."""
    import torch

    torch.set_num_threads(1)
    from optimizer.compress.stage import compress
    from optimizer.foundation import state as states
    from optimizer.recipe.schema import Compression

    asked = METHODS[name]
    source = llm_int4.loaded(args.out, dithered=False)
    base, evaluation = (
        source,
        llm_int4.windows(Path("eval.jsonl"), args.windows, args.sequences, source),
    )
    section = Compression.model_validate_json(
        json.dumps(
            {
                "calibrate": {
                    "data": {"source": "json", "files": ["given"]},
                    "samples": 32,
                    "sequence_length": 512,
                    "batch_size": 8,
                },
                "quantize": asked["quantize"],
                "sparsity": asked["sparsity"],
                "task": "text-generation",
                "compress": {"precision": asked.get("precision", "bf16")},
            }
        )
    )
    ids = llm_int4.windows(Path("calib.jsonl"), 32, args.sequences, source)
    batches = [
        {"input_ids": t, "attention_mask": torch.ones_like(t)} for t in torch.tensor(ids).split(8)
    ]
    with tempfile.TemporaryDirectory(dir=args.out) as folder:
        if "after" in asked:
            base = pruned_checkpoint(source, args.out / "states" / slug(asked["after"]), folder)
        state_folder = args.out / "states" / slug(name)
        shutil.rmtree(state_folder, ignore_errors=True)
        state_folder.mkdir(parents=True)
        before = time.process_time()
        compress(section, base, lambda: batches, state_folder)
        seconds = time.process_time() - before
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        state = states.read(state_folder)
        result = llm_int4.judged(source, state, evaluation)
    return {"method": name, "cpu_seconds": seconds, "peak_mb": peak / 1024, **result}


def slug(name: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in name)


def pruned_checkpoint(source: Path, state: Path, folder: str) -> Path:
    """Write the load stage's folder with the weights of a first walk."""
    from safetensors.torch import load_file, save_file

    made = Path(folder) / "load"
    shutil.copytree(source, made)
    file = made / "checkpoint" / "model.safetensors"
    tensors = load_file(file)
    for name, value in load_file(state / "tensors.safetensors").items():
        assert name in tensors
        tensors[name] = value.to(tensors[name].dtype)
    save_file(tensors, file, {"format": "pt"})
    return made


def peer(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run llm-compressor for a row in its own environment, and measure its checkpoint here."""
    import torch
    from safetensors.torch import load_file

    from optimizer.foundation.state import CompressedState

    source = llm_int4.loaded(args.out, dithered=False)
    made = args.out / slug(name)
    ids = llm_int4.windows(Path("calib.jsonl"), 32, args.sequences, source)
    (args.out / "windows.json").write_text(json.dumps(ids))
    asked = {
        **PEERS[name],
        "model": str(source / "checkpoint"),
        "windows": str(args.out / "windows.json"),
        "out": str(made),
    }
    worker = Path(__file__).with_name("peer.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    subprocess.run([args.peer, str(worker), json.dumps(asked)], check=True, env=environment)
    measured = json.loads((made / "measured.json").read_text())
    pruned = {n: t.float() for n, t in load_file(made / "pruned.safetensors").items()}
    torch.set_num_threads(1)
    evaluation = llm_int4.windows(Path("eval.jsonl"), args.windows, args.sequences, source)
    return {
        "method": name,
        **measured,
        **llm_int4.judged(source, CompressedState({}, pruned), evaluation),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "artifacts" / "sparsity")
    parser.add_argument("--sequences", type=Path)
    parser.add_argument("--windows", type=int, default=120)
    parser.add_argument("--only", default="", help="rows, separated by semicolons")
    parser.add_argument("--peer", help="python of an environment with llmcompressor")
    parser.add_argument("--results", type=Path, help="a folder for sparsity.json and .md")
    parser.add_argument("--said", default="", help="a line below the table: machine, load, date")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.worker:
        row = (peer if args.worker in PEERS else work)(args.worker, args)
        (args.out / f"{slug(args.worker)}.json").write_text(json.dumps(row, indent=1))
        return
    names = [n.strip() for n in args.only.split(";") if n.strip()]
    names = names or [*METHODS, *(PEERS if args.peer else ())]
    unknown = [n for n in names if n not in {**METHODS, **PEERS}]
    if unknown:
        sys.exit(f"--only: {unknown[0]!r} is not a row; rows are {'; '.join({**METHODS, **PEERS})}")
    rows = []
    for name in names:
        file = args.out / f"{slug(name)}.json"
        if not file.is_file():
            command = [
                sys.executable,
                "-m",
                "benchmarks.sparsity.loss",
                "--worker",
                name,
                "--out",
                str(args.out),
            ]
            command += ["--windows", str(args.windows)]
            command += ["--sequences", str(args.sequences)] if args.sequences else []
            command += ["--peer", args.peer] if args.peer else []
            subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        rows.append(json.loads(file.read_text()))
        print(llm_int4.table(rows[-1:]).splitlines()[-1], flush=True)
    if args.results:
        (args.results / "sparsity.json").write_text(json.dumps(rows, indent=1) + "\n")
        text = f"{NOTE}\n{llm_int4.table(rows)}\n{args.said}\n"
        (args.results / "sparsity.md").write_text(text)


if __name__ == "__main__":
    main()
