"""Peak memory of validate beside what plan predicts, each run in a process of its own.

    python -m benchmarks.ledger.validate_memory --models minilm mpnet
    python -m benchmarks.ledger.validate_memory --out benchmarks/results/validate_memory.json

minilm     the real all-MiniLM-L6-v2 by recipes/minilm-int8.yaml, for ONNX Runtime
mpnet      a random MPNet of the real one's sizes by the same recipe, rounded to nearest
smollm2    the real SmolLM2-135M by recipes/smollm2-int8.yaml, rounded to nearest

Prints one JSON document, {model: {peak_mb, estimate_mb, estimate_over_peak, cpu_seconds}}. The peak
is VmHWM, which starts at zero in a new process; cpu_seconds are those of validate. Timing is as
short as a recipe allows, and no gate needs to pass. The stages before validate run once, in
--store.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
MODELS = {
    "minilm": (ROOT / "recipes" / "minilm-int8.yaml", ()),
    "mpnet": (
        ROOT / "recipes" / "minilm-int8.yaml",
        ("quantize.method=rtn", "quantize.bias_correction=false", "calibrate.samples=32"),
    ),
    "smollm2": (
        ROOT / "recipes" / "smollm2-int8.yaml",
        ("quantize.methods=[rtn]", "quantize.fold_only=false"),
    ),
}
SHORT = (
    "validate.latency.iterations=5",
    "validate.latency.batch=[1]",
    "validate.latency.must_beat_float=false",
)


def write_mpnet(folder: Path) -> Path:
    """Write microsoft/mpnet-base's config with random weights and a vocabulary of its size.

    The vocabulary holds the words of the texts, so that texts have about their real lengths.
    """
    import torch
    from transformers import BertTokenizerFast, MPNetConfig, MPNetModel

    if (folder / "config.json").is_file():
        return folder
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,!?'-"
    words = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]", *letters, *(f"##{c}" for c in letters)]
    texts = "".join(f.read_text() for f in sorted((ROOT / "calibration").glob("sentiment-*.jsonl")))
    words += sorted({w for w in re.findall("[a-z]+", texts.lower()) if len(w) > 1})
    words += [f"word{i}" for i in range(30527 - len(words))]
    tokenizer = BertTokenizerFast(vocab={w: i for i, w in enumerate(words)}, model_max_length=512)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = MPNetConfig(vocab_size=len(words), pad_token_id=1, max_position_embeddings=514)
    MPNetModel(config).save_pretrained(folder)
    return folder


def validate(name: str, store_root: Path) -> dict[str, Any]:
    """Make the inputs of validate, in another process if they are missing, and run it here."""
    from optimizer import pipeline
    from optimizer.load.headers import read_shapes
    from optimizer.recipe import file as recipe_file
    from optimizer.store import Artifacts, Store
    from optimizer.validate.stage import STAGE

    file, changes = MODELS[name]
    if name == "mpnet":
        changes = (*changes, f"model.source={store_root / 'mpnet'}")
    recipe = recipe_file.read(file, (*changes, *SHORT))
    recipe = recipe.model_copy(update={"targets": recipe.targets[:1]})
    dry = Store(store_root, dry=True)
    pipeline.run(recipe, dry)
    steps = {s["stage"]: s["step"] for s in dry.log}
    missing = [n for n in ("load", "compress", "export", "lower", "build") if not steps[n].done]
    if missing:
        pipeline.run(recipe, Store(store_root, until="build"))
        return {}
    section = recipe.validation(recipe.targets[0])
    assert STAGE.estimate is not None
    estimate = STAGE.estimate(section, read_shapes(recipe.model)).memory
    out = store_root / f"{name}-validate"
    out.mkdir(exist_ok=True)
    made = Artifacts(*(steps[n].path for n in ("load", "compress", "export", "lower", "build")))
    before = time.process_time()
    STAGE.run(section, made, out=out)
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    peak = int(line.split()[1]) * 1024
    return {
        "peak_mb": round(peak / 1e6),
        "estimate_mb": round(estimate / 1e6),
        "estimate_over_peak": round(estimate / peak, 3),
        "cpu_seconds": round(time.process_time() - before, 1),
    }


def measure(name: str, store: Path) -> dict[str, Any]:
    """Measure in a fresh process, after another has made the missing inputs."""
    found: dict[str, Any] = {}
    while not found:
        out = subprocess.run(
            [sys.executable, __file__, "--child", name, "--store", str(store)],
            check=True,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        ).stdout
        found = json.loads(out)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS])
    parser.add_argument("--store", type=Path, default=ROOT / "artifacts" / "store")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", choices=[*MODELS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child == "mpnet":
        write_mpnet(options.store / "mpnet")
    if options.child:
        print(json.dumps(validate(options.child, options.store.resolve())))
        return
    found = {}
    for name in options.models:
        found[name] = measure(name, options.store.resolve())
        if options.out:  # after each: the next takes minutes
            options.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
