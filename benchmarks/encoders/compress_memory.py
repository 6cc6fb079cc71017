"""Peak memory of a stage by depth: random encoders of one width, each in its own process.

    python -m benchmarks.encoders.compress_memory --width 256 --layers 6 48
    python -m benchmarks.encoders.compress_memory --width 256 --layers 6 48 --reduce second_order

Prints one JSON document: {layers: {weights_mb, peak_mb, seconds}}. The peak is VmHWM, which
starts at zero in a new process; ru_maxrss may start at what the parent had when it forked.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WORDS = ("good", "bad", "great", "poor", "food", "phone", "movie", "not", "very", "love", "hate")


def make(folder: Path, width: int, layers: int) -> None:
    """Write a load stage's folder under `folder`, and calibration rows."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    from optimizer.load.stage import STAGE
    from optimizer.recipe.schema import Model

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    model, out = folder / "model", folder / "load"
    BertTokenizerFast(
        vocab={w: i for i, w in enumerate(vocabulary)}, model_max_length=64
    ).save_pretrained(model)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        intermediate_size=4 * width,
        max_position_embeddings=64,
    )
    BertModel(config).save_pretrained(model)
    out.mkdir()
    STAGE.run(Model(source=str(model), task="feature-extraction"), out=out)
    texts = [" ".join(WORDS[(i * 7 + j * 3) % len(WORDS)] for j in range(20)) for i in range(16)]
    rows = "".join(json.dumps({"text": f"{t} {i}"}) + "\n" for i, t in enumerate(texts))
    (folder / "rows.jsonl").write_text(rows)


def compress(folder: Path) -> dict[str, Any]:
    """Compress with static ranges and smoothing; report memory and time."""
    from optimizer.compress.stage import STAGE
    from optimizer.recipe.schema import Activations, Calibrate, Compression, DataSpec, Quantize

    rows = DataSpec(source="json", files=(str(folder / "rows.jsonl"),))
    section = Compression(
        calibrate=Calibrate(data=rows, samples=16, sequence_length=32),
        quantize=Quantize(method="smoothquant", strength=0.5, activations=Activations()),
        task="feature-extraction",
    )
    (folder / "out").mkdir()
    started = time.monotonic()
    STAGE.run(section, folder / "load", out=folder / "out")
    return taken(folder, started)


def reduce(folder: Path, importance: str) -> dict[str, Any]:
    """Leave out a quarter of the neurons; report memory and time."""
    from optimizer.recipe.schema import Calibrate, DataSpec, Reduce, Reduction
    from optimizer.reduce.stage import STAGE

    rows = DataSpec(source="json", files=(str(folder / "rows.jsonl"),))
    section = Reduction(
        reduce=Reduce.model_validate({"goal": {"keep": 0.83}, "importance": importance}),
        calibrate=Calibrate(data=rows, samples=16, sequence_length=32),
        task="feature-extraction",
    )
    (folder / "out").mkdir()
    started = time.monotonic()
    STAGE.run(section, folder / "load", out=folder / "out")
    return taken(folder, started)


def taken(folder: Path, started: float) -> dict[str, Any]:
    status = Path("/proc/self/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    size = (folder / "load" / "checkpoint" / "model.safetensors").stat().st_size
    return {
        "weights_mb": round(size / 2**20, 1),
        "peak_mb": round(int(peak.split()[1]) / 2**10, 1),
        "seconds": round(time.monotonic() - started, 1),
    }


def measure(width: int, layers: int, importance: str | None) -> dict[str, Any]:
    """Make and compress (or reduce) one encoder, each in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        for command in ("make", "reduce" if importance else "compress"):
            last = [importance] if importance and command == "reduce" else [str(width), str(layers)]
            out = subprocess.run(
                [sys.executable, __file__, command, folder, *last],
                check=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            ).stdout
    return dict(json.loads(out))


def main() -> None:
    if sys.argv[1:2] == ["make"]:
        make(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    elif sys.argv[1:2] == ["compress"]:
        print(json.dumps(compress(Path(sys.argv[2]))))
    elif sys.argv[1:2] == ["reduce"]:
        print(json.dumps(reduce(Path(sys.argv[2]), sys.argv[3])))
    else:
        parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
        parser.add_argument("--width", type=int, default=256)
        parser.add_argument("--layers", type=int, nargs="+", default=[6, 48])
        parser.add_argument("--reduce", help="an importance: measure reduce instead")
        options = parser.parse_args()
        found = {str(n): measure(options.width, n, options.reduce) for n in options.layers}
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
