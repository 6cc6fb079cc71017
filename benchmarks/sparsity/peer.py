"""Prune with llm-compressor's SparseGPT or Wanda on given windows, in its own environment.

    PEER_PYTHON peer.py '{"peer": "SparseGPT", "pattern": "2:4", "model": FOLDER,
                          "windows": FILE, "out": FOLDER}'

Called by loss.py. Writes the pruned matrices of the blocks as float32 (pruned.safetensors) and
measured.json. Imports no module of this project.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path


def main() -> None:
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers import pruning
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    asked = json.loads(sys.argv[1])
    ids = json.loads(Path(asked["windows"]).read_text(encoding="utf-8"))
    rows = {"input_ids": ids, "attention_mask": [[1] * len(window) for window in ids]}
    model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(asked["model"])
    modifier = {"SparseGPT": "SparseGPTModifier", "Wanda": "WandaPruningModifier"}[asked["peer"]]
    recipe = getattr(pruning, modifier)(
        sparsity=asked.get("amount", 0.5),
        mask_structure=asked["pattern"] if ":" in asked["pattern"] else "0:0",
        targets=["Linear"],
        ignore=["re:.*lm_head"],
    )
    before = time.process_time()
    oneshot(
        model=model,
        processor=tokenizer,
        dataset=Dataset.from_dict(rows),
        recipe=recipe,
        max_seq_length=len(ids[0]),
        num_calibration_samples=len(ids),
        shuffle_calibration_samples=False,
    )
    seconds = time.process_time() - before
    out = Path(asked["out"])
    out.mkdir(parents=True, exist_ok=True)
    pruned = {
        name: value.detach().float().contiguous()
        for name, value in model.named_parameters()
        if ".layers." in name and value.ndim == 2
    }
    save_file(pruned, out / "pruned.safetensors")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    zeros = sum(int((v == 0).sum()) for v in pruned.values()) / sum(
        v.numel() for v in pruned.values()
    )
    measured = {"cpu_seconds": seconds, "peak_mb": peak, "zeros": zeros}
    (out / "measured.json").write_text(json.dumps(measured))


if __name__ == "__main__":
    main()
