"""Peak memory of compressing decoders, of one width at several depths or of one large checkpoint.

    python -m benchmarks.decoders.llm_memory --width 512 --layers 6 48 --method gptq
    # width 3072, bfloat16, minutes
    python -m benchmarks.decoders.llm_memory --gigabytes 8 --method rtn
    python -m benchmarks.decoders.llm_memory --width 3072 --layers 2 3 --tokens 256 --results
        FILE.json

Checkpoints are random Llamas, bfloat16, tied. Each is made and compressed in a process of its own.
Prints one JSON document: {layers: {weights_mb, block_mb, peak_mb, cpu_seconds}}; block_mb is one
block in float32. The peak is VmHWM, which starts at zero in a new process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from math import prod
from pathlib import Path
from typing import Any


def make(folder: Path, width: int, layers: int) -> None:
    """Write the folder of a load stage, tensor by tensor."""
    import torch
    from transformers import LlamaConfig

    from optimizer.foundation import safetensors_stream
    from optimizer.model.checkpoint.model import build_skeleton_from_config, list_parameter_shapes

    config = LlamaConfig(
        vocab_size=4 * width,
        hidden_size=width,
        intermediate_size=width * 8 // 3 // 64 * 64,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 256),
        head_dim=64,
        tie_word_embeddings=True,
    )
    checkpoint = folder / "load" / "checkpoint"
    checkpoint.mkdir(parents=True)
    config.save_pretrained(checkpoint)
    shapes = list_parameter_shapes(build_skeleton_from_config(config, "text-generation"))

    def read(name: str) -> torch.Tensor:
        if len(shapes[name]) == 1:
            return torch.ones(shapes[name], dtype=torch.bfloat16)
        return (torch.randn(shapes[name]) * 0.02).to(torch.bfloat16)

    specs = {name: (torch.bfloat16, shape) for name, shape in shapes.items()}
    safetensors_stream.write_known(specs, read, checkpoint / "model.safetensors")


def compress(folder: Path, method: str, tokens: int) -> dict[str, Any]:
    """Compress to 4 bits in groups of 64; report memory and time."""
    import torch

    from optimizer.compress.stage import compress as run
    from optimizer.model.checkpoint.checkpoint import open_checkpoint
    from optimizer.recipe.schema import Compression, Quantize, Weights

    torch.set_num_threads(1)
    section = Compression(
        calibrate=None,
        quantize=Quantize(
            methods=(method,),  # type: ignore[arg-type]
            weights=Weights(bits=4, granularity="group", group_size=64),
        ),
        task="text-generation",
    )
    checkpoint = open_checkpoint(folder / "load")
    ids = torch.randint(0, checkpoint.config["vocab_size"], (tokens // 128, 128))
    batches = [{"input_ids": b, "attention_mask": torch.ones_like(b)} for b in ids.split(2)]
    (folder / "out").mkdir()
    started = time.process_time()
    run(section, folder / "load", lambda: batches if method != "rtn" else [], folder / "out")
    status = Path("/proc/self/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    sizes = {n: prod(checkpoint.shape(n)) for n in checkpoint.tensors}
    block = sum(s for n, s in sizes.items() if ".layers.0." in n)
    return {
        "weights_mb": round(2 * sum(sizes.values()) / 2**20, 1),
        "block_mb": round(4 * block / 2**20, 1),
        "peak_mb": round(int(peak.split()[1]) / 2**10, 1),
        "cpu_seconds": round(time.process_time() - started, 1),
    }


def measure(width: int, layers: int, method: str, tokens: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        for command in ("make", "compress"):
            arguments = [command, folder, str(width), str(layers), method, str(tokens)]
            out = subprocess.run(
                [sys.executable, __file__, *arguments],
                check=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            ).stdout
    return dict(json.loads(out))


def main() -> None:
    if sys.argv[1:2] == ["make"]:
        make(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
        return
    if sys.argv[1:2] == ["compress"]:
        print(json.dumps(compress(Path(sys.argv[2]), sys.argv[5], int(sys.argv[6]))))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, nargs="+", default=[6, 48])
    parser.add_argument("--gigabytes", type=float, help="of one checkpoint of width 3072 instead")
    parser.add_argument("--method", choices=("rtn", "gptq"), default="gptq")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--results", type=Path, help="a JSON file that this run is added to")
    options = parser.parse_args()
    width, depths = options.width, options.layers
    if options.gigabytes:
        width = 3072
        block = width**2 * 2.5 + 3 * width * (width * 8 // 3)
        depths = [round((options.gigabytes * 1e9 / 2 - 4 * width**2) / block)]
    found = {str(n): measure(width, n, options.method, options.tokens) for n in depths}
    print(json.dumps(found, indent=1))
    if options.results:
        kept = json.loads(options.results.read_text()) if options.results.exists() else {}
        name = f"{options.method}, width {width}, {options.tokens} tokens"
        kept[name] = {**kept.get(name, {}), **found}
        options.results.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
