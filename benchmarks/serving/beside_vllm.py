"""Throughput of the same INT4 weights served by vLLM and by us, at 1, 4 and 8 texts at a time.

    VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind PYTHON \\
        -m vllm.entrypoints.openai.api_server --model FOLDER --served-model-name vllm \\
        --host 127.0.0.1 --port PORT --max-model-len 1024 --enforce-eager --dtype bfloat16 \\
        --max-num-seqs 8
    python -m benchmarks.serving.beside_vllm --vllm PORT [--rounds 3] [--out FILE]
                                      [--option=--batching --option=padded] BUNDLE ...

FOLDER is the output of the target `compressed-tensors` with a float head (vLLM's CPU kernels are
4-bit only); each BUNDLE is of the same recipe for another target. PYTHON has vllm-cpu, a build of
vLLM for CPUs, which takes minutes to start and is therefore started by hand.

In each round each server has clients that each wait for their answers: prompts of 5 to about 100
tokens, 48 new tokens, greedy. The metric is new tokens per second, prefill included. vLLM computes
in bf16, so that its texts may differ; decoder.py compares ours with `predict`'s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.serving.client import percentiles
from benchmarks.serving.decoder import NEW, complete, prompts, server
from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.runtimes.machine import describe_machine

CLIENTS, SLOTS = (1, 4, 8), 8
EACH = 2  # texts per client and round


async def tokens_a_second(port: int, model: str, clients: int) -> tuple[float, list[float]]:
    """Measure new tokens per second, and the seconds to each first token."""
    firsts, asked = list[float](), prompts()

    async def client(number: int) -> None:
        for i in range(EACH):
            text = asked[(number + clients * i) % len(asked)]
            firsts.append((await complete(port, model, text, NEW))[1])

    start = time.perf_counter()
    await asyncio.gather(*map(client, range(clients)))
    return clients * EACH * NEW / (time.perf_counter() - start), firsts


async def measured(places: dict[str, tuple[int, str]], rounds: int) -> dict[str, Any]:
    rates: dict[str, dict[str, list[float]]] = {n: {str(c): [] for c in CLIENTS} for n in places}
    firsts: dict[str, dict[str, list[float]]] = {n: {str(c): [] for c in CLIENTS} for n in places}
    for i in range(rounds + 1):  # the first warms up
        for clients in CLIENTS:
            for name, (port, model) in places.items():
                rate, waited = await tokens_a_second(port, model, clients)
                if i:
                    rates[name][str(clients)].append(round(rate, 1))
                    firsts[name][str(clients)] += waited
    return {
        name: {
            clients: {
                "tokens_per_second": found,
                "median": median(found),
                "first_token_ms": percentiles(firsts[name][clients]),
            }
            for clients, found in rates[name].items()
        }
        for name in places
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundles", type=Path, nargs="+", metavar="BUNDLE")
    parser.add_argument("--vllm", type=int, required=True, metavar="PORT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--option", action="append", default=[], help="of our `serve`; repeatable")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    places = {"vllm": (args.vllm, "vllm")}
    with ExitStack() as stack:
        for path in args.bundles:
            with Bundle(path) as bundle:
                model, target = str(bundle.manifest["name"]), str(bundle.engine["target"])
            served = stack.enter_context(server(path, SLOTS, args.option))
            places[f"{target}, sharing {served.start['sharing']}"] = served.port, model
        figures = asyncio.run(measured(places, args.rounds))
    machine = describe_machine().to_json()
    document = {"machine": machine, "load": os.getloadavg(), "servers": figures}
    text = json.dumps(document, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
