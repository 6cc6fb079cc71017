"""Loss of SmolLM2 as a GGUF file: ours beside files that llama.cpp quantizes itself.

    npm pack @node-llama-cpp/linux-x64@3.22.1 && tar xzf node-llama-cpp-linux-x64-3.22.1.tgz
    # about 40 minutes
    python -m benchmarks.decoders.gguf_quality --library package/bins/linux-x64 --write

All start from one float file. llama.cpp's own are made by the library's llama_model_quantize, with
and without an importance matrix: the mean square of each input of each linear over the windows that
ours is calibrated on. Every file is de-quantized by the gguf package inside transformers and run in
float32, on windows of 512 tokens of documents that calibration did not see, so that nothing but
the stored weights differs. dNLL: nats per token above the float file; the interval is of the mean
over windows (paired, t). Rows named "dithered" are of the model with noise of half a step of the
packaged 4-bit grid added (benchmarks/decoders/llm_int4.py). Each row is kept in --out and
not made again.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.decoders import llama_library
from benchmarks.decoders.llm_int4 import loaded, windows

ROOT = Path(__file__).resolve().parents[2]

G32 = {"bits": 4, "granularity": "group", "group_size": 32}
EMBEDDING = {"bits": 8, "granularity": "group", "group_size": 32}
OURS: dict[str, dict[str, Any]] = {
    "ours Q4_0, -7..7": {"methods": ["gptq"], "weights": G32},
    "ours Q4_0, full range": {"methods": ["gptq"], "weights": {**G32, "full_range": True}},
    "ours Q8_0": {"method": "rtn", "weights": {**G32, "bits": 8}},
}
THEIRS = {  # {row: (llama_ftype, with the importance matrix)}
    "llama.cpp Q4_0": (llama_library.Q4_0, False),
    "llama.cpp Q4_0, imatrix": (llama_library.Q4_0, True),
    "llama.cpp Q4_K_M": (llama_library.Q4_K_M, False),
    "llama.cpp Q4_K_M, imatrix": (llama_library.Q4_K_M, True),
    "llama.cpp Q8_0": (llama_library.Q8_0, False),
}
FLOAT = "float (F16 file)"
ROWS = [FLOAT, *OURS, *THEIRS]
LINEARS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def importance_of(source: Path, tokens: list[list[int]]) -> dict[str, Any]:
    """Compute {GGUF tensor: mean square of its inputs} of the linears in the blocks."""
    import numpy as np
    import torch

    from optimizer.model.checkpoint.checkpoint import open_checkpoint
    from optimizer.model.checkpoint.model import load_torch_model

    model: Any = load_torch_model(open_checkpoint(source), "text-generation")
    sums: dict[str, Any] = {}

    def watch(name: str) -> Any:
        def hook(_module: Any, inputs: tuple[Any, ...]) -> None:
            rows = inputs[0].detach().reshape(-1, inputs[0].shape[-1])
            sums[name] = sums.get(name, 0) + rows.double().square().mean(0) / len(tokens)

        return hook

    for module, tensor in LINEARS.items():
        for i, block in enumerate(model.model.layers):
            name = f"blk.{i}.{tensor}.weight"
            block.get_submodule(module).register_forward_pre_hook(watch(name))
    with torch.no_grad():
        for ids in tokens:
            model(input_ids=torch.tensor(ids)[None], use_cache=False)
    return {n: np.ascontiguousarray(t.numpy(), np.float32) for n, t in sums.items()}


def lowered(source: Path, state: Path, out: Path) -> Path:
    """Write the GGUF file of a state."""
    from optimizer.lower.gguf.folder import FILE, lower
    from optimizer.recipe.targets import GgufTarget

    lower(GgufTarget(runtime="gguf"), source, state, state, out)
    return out / FILE


def compressed(source: Path, quantize: dict[str, Any], tokens: list[list[int]], out: Path) -> None:
    """Write a state to `out`, with embedding and head in the same 8 bits."""
    import torch

    from optimizer.compress.stage import compress
    from optimizer.recipe.schema import Calibrate, Compress, Compression, DataSpec, Quantize

    section = Compression(
        calibrate=Calibrate(
            data=DataSpec(source="json", files=("windows",)), samples=32, sequence_length=512
        ),
        quantize=Quantize.model_validate_json(
            json.dumps({**quantize, "head": "tied", "embedding": EMBEDDING})
        ),
        task="text-generation",
        compress=Compress(precision="bf16"),
    )
    batches = [
        {"input_ids": t, "attention_mask": torch.ones_like(t)}
        for t in torch.tensor(tokens).split(8)
    ]
    compress(section, source, lambda: batches, out)


@contextmanager
def file_of(row: str, source: Path, args: argparse.Namespace) -> Iterator[tuple[Path, float]]:
    """Make the file of a row; yield it with the CPU seconds of quantizing."""
    from optimizer.foundation import state as states
    from optimizer.foundation.state import CompressedState

    calibration = windows(Path("calib.jsonl"), 32, None, source)
    with tempfile.TemporaryDirectory(dir=args.out) as folder:
        state, out = Path(folder) / "state", Path(folder) / "out"
        state.mkdir()
        out.mkdir()
        started = time.process_time()
        if row in OURS:
            compressed(source, OURS[row], calibration, state)
        else:
            states.write(CompressedState({}), state)
        file = lowered(source, state, out)
        if row in THEIRS:
            ftype, weighted = THEIRS[row]
            importance = importance_of(source, calibration) if weighted else {}
            llama_library.quantize(args.library, file, out / "theirs.gguf", ftype, importance)
            file = out / "theirs.gguf"
        yield file, time.process_time() - started


def losses(file: Path, evaluation: list[list[int]]) -> list[float]:
    """Compute nats per token of each window."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.float32
    )
    found = []
    with torch.no_grad():
        for ids in evaluation:
            tokens = torch.tensor(ids)
            logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
            found.append(float(torch.nn.functional.cross_entropy(logits, tokens[1:])))
    return found


def interval(differences: list[float]) -> tuple[float, float, float]:
    """Compute the mean and the ends of its 95 % interval (Student)."""
    from statistics import mean, stdev

    from scipy.stats import t

    n = len(differences)
    half = float(t.ppf(0.975, n - 1)) * stdev(differences) / math.sqrt(n)
    return mean(differences), mean(differences) - half, mean(differences) + half


def table(rows: dict[str, dict[str, Any]]) -> str:
    lines = ["| file | MB | perplexity | dNLL | CPU s to quantize |", "|---|---|---|---|---|"]
    for name, row in rows.items():
        base = rows[FLOAT + (" dithered" if name.endswith(" dithered") else "")]["losses"]
        middle, low, high = interval([a - b for a, b in zip(row["losses"], base, strict=True)])
        perplexity = math.exp(sum(row["losses"]) / len(row["losses"]))
        loss = f"{middle:.4f} ({low:.4f} to {high:.4f})" if row["losses"] != base else "0"
        lines.append(
            f"| {name} | {row['bytes'] / 1e6:.1f} | {perplexity:.2f} | {loss} | "
            f"{row['cpu_seconds']:.0f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--library", type=Path, required=True, help="folder of libllama")
    parser.add_argument("--out", type=Path, default=ROOT / "artifacts" / "gguf_quality")
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--only", default="", help="rows, separated by semicolons")
    parser.add_argument("--note", default="", help="a line below the table: machine, load, date")
    parser.add_argument("--write", action="store_true", help="results/gguf_quality.{md,json}")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    names = [n.strip() for n in args.only.split(";") if n.strip()]
    names = names or [*ROWS, *(f"{row} dithered" for row in ROWS)]
    rows: dict[str, dict[str, Any]] = {}
    for name in names:
        row, dithered = name.removesuffix(" dithered"), name.endswith(" dithered")
        if row not in ROWS:
            sys.exit(f"--only: {row!r} is not a row; rows are {'; '.join(ROWS)}")
        kept = args.out / f"{name.replace(' ', '_').replace(',', '')}.json"
        if not kept.is_file():
            source = loaded(args.out, dithered)
            evaluation = windows(Path("eval.jsonl"), args.windows, None, source)
            with file_of(row, source, args) as (file, seconds):
                sizes = {"bytes": file.stat().st_size, "cpu_seconds": seconds}
                kept.write_text(json.dumps({**sizes, "losses": losses(file, evaluation)}))
        rows[name] = json.loads(kept.read_text())
        print(name, math.exp(sum(rows[name]["losses"]) / len(rows[name]["losses"])), flush=True)
    print(table(rows))
    if args.write:
        results = ROOT / "benchmarks" / "results"
        (results / "gguf_quality.json").write_text(json.dumps(rows, indent=1) + "\n")
        intro = (__doc__ or "").split("\n\n")
        title = "# SmolLM2-135M-Instruct as GGUF\n\n"
        text = f"{title}{intro[2].strip()}\n\n{table(rows)}\n{args.note}\n"
        (results / "gguf_quality.md").write_text(text)


if __name__ == "__main__":
    main()
