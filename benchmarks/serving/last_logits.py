"""Processor time of a prompt with the logits of all its tokens, and of the last only, in turns.

    python -m benchmarks.serving.last_logits LOWERED LOADED [--tokens 128 512] [--rounds 7]

LOWERED is the folder of step `lower` for ONNX Runtime on a CPU, LOADED that of `load`. One thread,
and its processor time, so that other work on the machine changes little.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.harness import contract as contracts
from optimizer.harness.runtimes.machine import describe_machine
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.harness.tasks.text_generation import arrays


def measure(runner: OrtRunner, contract: Any, tokens: int, rounds: int) -> dict[str, Any]:
    """Time a prompt of `tokens` random tokens both ways, `rounds` times after a warm-up."""
    ids = np.random.default_rng(0).integers(10, 2000, tokens).tolist()
    prompt = arrays(contract, [ids])

    def run(last: bool) -> tuple[float, Any]:
        decoder = runner.decoder(contract, tokens + 1)
        start = time.process_time()
        logits = decoder.last(prompt) if last else decoder.step(prompt)[:, -1]
        return time.process_time() - start, logits

    every, alone = run(False)[1], run(True)[1]
    pairs = [(run(False)[0], run(True)[0]) for _ in range(rounds)]
    ratios = sorted(last / all_ for all_, last in pairs)
    return {
        "tokens": tokens,
        "all_ms": round(1000 * float(np.median([a for a, _ in pairs])), 1),
        "last_ms": round(1000 * float(np.median([b for _, b in pairs])), 1),
        "ratios": [round(r, 3) for r in ratios],
        "largest_difference": float(np.abs(every - alone).max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lowered", type=Path)
    parser.add_argument("loaded", type=Path)
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 512])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    contract = contracts.read(args.loaded / "contract.json")
    with OrtRunner(args.lowered / "model.onnx", threads=1) as runner:
        rows = [measure(runner, contract, n, args.rounds) for n in args.tokens]
    machine = describe_machine()
    print(json.dumps({"machine": {"cpu": machine.cpu, "cores": machine.cores}, "rows": rows}))


if __name__ == "__main__":
    main()
