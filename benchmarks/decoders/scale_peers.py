"""Other tools' memory and time for the 4-bit weights of scale.py's random checkpoints.

    python -m benchmarks.decoders.scale_peers --shape 1B --peer-python PYTHON --results

    onnxruntime-genai   its model builder, INT4 by its default (round to nearest), for the CPU; run
                        by this environment
    llm-compressor      W4A16 by round to nearest, and by GPTQ from 32 texts of 512 tokens; run by
                        --peer-python, which has llmcompressor

Run scale.py for the same shapes before, in the same session: it makes the checkpoints, and its
figures stand beside these. None of the peers proves its result; ours does in the stage `validate`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.measure import memory
from benchmarks.measure.results import RESULTS, ROOT, conditions, table, write

GROUP, SAMPLES, TOKENS = 128, 32, 512  # as scale.recipe has for shapes whose width they divide
SHARED = ("load", "compress", "export", "lower", "build")  # stages of ours that a peer has too
TEXTS = ROOT / "calibration" / "jargon-calibrate.jsonl"
PEERS = ("onnxruntime-genai rtn", "llm-compressor rtn", "llm-compressor gptq")


def command(peer: str, checkpoint: Path, out: Path, peer_python: str) -> list[str]:
    """Return the command line that makes `out` of a checkpoint."""
    if peer.startswith("onnxruntime-genai"):
        builder = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
        # with a local folder in place of a name the builder still wants a name for its cache
        words = ["-i", checkpoint, "-o", out, "-p", "int4", "-e", "cpu", "-c", out.parent / "cache"]
        return [*builder, *map(str, words), "--extra_options", f"block_size={GROUP}"]
    module = [peer_python, "-m", "benchmarks.decoders.scale_peers", "--compress"]
    return [*module, peer.split()[1], str(checkpoint), str(out)]


def compress(method: str, checkpoint: str, out: str) -> None:
    """Quantize with llm-compressor, in its environment, and save the result."""
    import torch
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    modifier = GPTQModifier if method == "gptq" else QuantizationModifier
    chosen = modifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])
    data: dict[str, Any] = {}
    if method == "gptq":
        text = "\n".join(json.loads(line)["text"] for line in TEXTS.read_text().splitlines())
        ids = tokenizer(text)["input_ids"]
        ids *= -(-SAMPLES * TOKENS // len(ids))
        windows = [ids[i * TOKENS : (i + 1) * TOKENS] for i in range(SAMPLES)]
        rows = {"input_ids": windows, "attention_mask": [[1] * TOKENS] * SAMPLES}
        data = {
            "dataset": Dataset.from_dict(rows),
            "num_calibration_samples": SAMPLES,
            "max_seq_length": TOKENS,
        }
    oneshot(model=model, recipe=chosen, **data)
    model.save_pretrained(out)


def page(result: Mapping[str, Any]) -> str:
    """Format one table per shape, ours first."""
    when = result["conditions"]
    lines = [
        "# Four-bit weights of a random checkpoint, by tool",
        "",
        f"{when['when']}, {when['machine'].get('cpu', 'unknown processor')}, load average "
        f"{when['load_average'][0]} to {when['load_average'][1]}. Made by `python -m "
        "benchmarks.decoders.scale_peers`. Ours is the stages "
        f"{', '.join(SHARED)} of results/scale.md: their seconds with one start, the processor "
        "seconds of a process per stage, the highest memory. The others are one process each. "
        "Memory is anonymous; VmHWM counts mapped files too. None of the rows contains a proof.",
    ]
    for shape, rows in result["cells"].items():
        lines += ["", f"## {shape}", "", rows_table(rows)]
    return "\n".join(lines) + "\n"


def rows_table(rows: Mapping[str, Any]) -> str:
    """Format {tool: figures} as a table."""
    return table(
        ["tool", "seconds", "processor s", "memory MB", "VmHWM MB"],
        [
            [
                name,
                f"{used['seconds']:,.1f}",
                f"{used['cpu_seconds']:,.1f}",
                f"{used['anonymous'] / 1e6:,.0f}",
                f"{used['resident'] / 1e6:,.0f}",
            ]
            if not used["exit_code"]
            else [f"{name}: exit {used['exit_code']}", "", "", "", ""]
            for name, used in rows.items()
        ],
    )


def ours(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Sum the stages of scale.py that make what a peer makes, started as one process: every stage's
    own time, and one start."""
    stages = [measured["stages"][name] for name in SHARED if name in measured["stages"]]
    start = min(s["seconds"] - s["stage_seconds"] for s in stages)
    return {
        "exit_code": 0,
        "seconds": start + sum(s["stage_seconds"] for s in stages),
        "cpu_seconds": sum(s["cpu_seconds"] for s in stages),
        "anonymous": max(s["anonymous"] for s in stages),
        "resident": max(s["resident"] for s in stages),
    }


def main(words: Iterable[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", action="append", default=[], help="repeatable")
    parser.add_argument("--peer", action="append", choices=PEERS, help="repeatable; default: all")
    parser.add_argument("--peer-python", default=sys.executable, help="has llmcompressor")
    parser.add_argument("--work", type=Path, default=ROOT / "artifacts" / "scale")
    parser.add_argument("--results", action="store_true", help="write results/scale_peers.*")
    parser.add_argument("--compress", nargs=3, metavar=("METHOD", "CHECKPOINT", "OUT"))
    options = parser.parse_args(None if words is None else list(words))
    if options.compress:
        compress(*options.compress)
        return
    load_before, cells = os.getloadavg()[0], {}
    for shape in options.shape:
        work = options.work.resolve() / shape
        rows = {
            f"ours {method}": ours(json.loads(file.read_text()))
            for method in ("rtn", "gptq")
            if (file := work / f"{method}.json").is_file()
        }
        for peer in options.peer or PEERS:
            out = work / peer.replace(" ", "-")
            shutil.rmtree(out, ignore_errors=True)
            program = command(peer, work / "checkpoint", out, options.peer_python)
            print(f"{shape}: {peer}", file=sys.stderr, flush=True)
            rows[peer] = memory.run(program, work / f"{out.name}.log").as_dict()
            shutil.rmtree(out, ignore_errors=True)
        print(rows_table(rows), flush=True)
        cells[shape] = rows
    if options.results:
        result = {"conditions": conditions(load_before, rounds=1, clock="wall"), "cells": cells}
        write(result, page(result), RESULTS, "scale_peers")


if __name__ == "__main__":
    main()
