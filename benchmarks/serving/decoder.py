"""Gain of slots: tokens per second of a decoder served with one slot and with eight, in one run.

    python -m benchmarks.serving.decoder BUNDLE [--batching padded] [--threads N]
                                                [--rounds 3] [--out FILE]

Two servers of the same bundle, one with --slots 1 and one with --slots 8, answer the same requests
in turns: prompts of unequal lengths at random instants (Poisson), faster than either answers.
Throughput is tokens over the time from the first request to the last answer. CPU seconds per token
are measured as well, as the machine may have other work.

Then, with seven texts running on the eight slots, the benchmark measures the time to the first
token of an eighth, and the part of it after sampling: from sending the request to reading the
token, less the server's own metric from acceptance to sampling (so that reading the request is
included). The same is measured without other texts; --rounds 0 measures only these.

Every answer is compared with `predict`'s text. Exit 1 when one differs (with --batching exact) or
is missing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving.client import percentiles
from benchmarks.serving.overhead import cpu
from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.generate import Options
from optimizer.harness.runtimes.machine import describe_machine

TOPICS = ("the sea", "a good film", "how bread is made", "why the sky is blue", "an old train")
TEXTS, NEW = 16, 48  # requests of a round, tokens of each answer
RATE = 8.0  # requests per second, above both capacities
SLOTS = (1, 8)
LATE = 30  # number of short texts to time the first token of
SHORT = "The capital of France is"  # then a word: a token without text is not sent
FIRST = "vllm:time_to_first_token_seconds_sum"
PATIENCE = "86400"  # seconds, so that nothing is refused


@dataclass
class Server:
    process: subprocess.Popen[str]
    port: int
    start: dict[str, Any]  # the line warmed_up of its log


def prompts() -> list[str]:
    """Make prompts of 5 to about 100 tokens."""
    return [f"Tell me about {TOPICS[i % 5]}. " * (1 + 3 * (i % 6)) for i in range(TEXTS)]


@contextmanager
def server(bundle: Path, slots: int, options: list[str]) -> Iterator[Server]:
    command = [sys.executable, "-m", "optimizer", "serve", str(bundle), "--port", "0"]
    command += ["--slots", str(slots), "--context", "1024", *options]
    command += ["--timeout", PATIENCE, "--max-wait", PATIENCE]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    port, start, line = 0, dict[str, Any](), dict[str, Any]()
    while line.get("event") != "ready":
        line = json.loads(process.stderr.readline())
        port = line.get("port", port)
        start = line if line["event"] == "warmed_up" else start
    log = threading.Thread(target=lambda: list(process.stderr or ()), daemon=True)
    log.start()
    try:
        yield Server(process, port, start)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


async def complete(port: int, model: str, prompt: str, tokens: int) -> tuple[str, float, float]:
    """Stream a completion; return (text, seconds to the first token, seconds to the last)."""
    document = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    body = json.dumps({**document, "ignore_eos": True, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    head += "content-type: application/json"  # vLLM refuses requests without it
    start, first, text, ended = time.perf_counter(), 0.0, "", False
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    async for line in reader:
        if not line.startswith(b"data: "):
            continue
        first = first or time.perf_counter() - start
        ended = line.startswith(b"data: [DONE]")
        if not ended:
            text += json.loads(line[6:])["choices"][0]["text"]
    writer.close()
    if not ended:
        raise EOFError("a stream ended without [DONE]")
    return text, first, time.perf_counter() - start


async def round_of(served: Server, model: str, seed: int) -> tuple[dict[str, Any], list[str]]:
    chance, tasks = random.Random(seed), list[asyncio.Task[tuple[str, float, float]]]()
    before, start = cpu(served.process.pid), time.perf_counter()
    for prompt in prompts():
        tasks.append(asyncio.create_task(complete(served.port, model, prompt, NEW)))
        await asyncio.sleep(chance.expovariate(RATE))
    answers = await asyncio.gather(*tasks)
    seconds, spent = time.perf_counter() - start, cpu(served.process.pid) - before
    tokens = TEXTS * NEW
    figures = {
        "tokens_per_second": round(tokens / seconds, 2),
        "cpu_ms_per_token": round(1000 * spent / tokens, 2),
        "first_token_ms": percentiles([first for _, first, _ in answers]),
    }
    return figures, [text for text, _, _ in answers]


async def sampled(port: int) -> float:
    """Read the server's sum of seconds to the sampling of first tokens."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    lines = (await reader.read()).decode().splitlines()
    writer.close()
    return float(next(line for line in lines if line.startswith(FIRST)).split()[-1])


async def first_tokens(
    served: Server, model: str, others: int, number: int
) -> tuple[list[float], list[float]]:
    """Send short texts one after the other while `others` texts run.

    Returns seconds to each first token, and the part of them after sampling.
    """
    running = [
        asyncio.create_task(complete(served.port, model, p, 400)) for p in prompts()[:others]
    ]
    await asyncio.sleep(2)
    whole, after = list[float](), list[float]()
    for _ in range(number):
        before = await sampled(served.port)
        whole.append((await complete(served.port, model, SHORT, 2))[1])
        after.append(whole[-1] - (await sampled(served.port) - before))
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return whole, after


async def measured(
    servers: dict[int, Server], model: str, expected: list[str], rounds: int
) -> dict[str, Any]:
    figures: dict[str, list[Any]] = {str(slots): [] for slots in servers}
    different = 0
    for i in range(rounds + 1):
        for slots, served in servers.items():
            one, texts = await round_of(served, model, i)
            different += sum(a != b for a, b in zip(texts, expected, strict=True))
            if i:  # the first warms up
                figures[str(slots)].append(one)
    one, many = (figures[str(s)] for s in SLOTS)
    pairs = list(zip(one, many, strict=True))
    others = SLOTS[1] - 1
    late, after = await first_tokens(servers[SLOTS[1]], model, others, LATE)
    _, after_alone = await first_tokens(servers[SLOTS[1]], model, 0, LATE)
    return {
        "rounds": figures,
        "tokens_per_second_ratio": [
            round(m["tokens_per_second"] / o["tokens_per_second"], 2) for o, m in pairs
        ],
        "cpu_per_token_ratio": [
            round(o["cpu_ms_per_token"] / m["cpu_ms_per_token"], 2) for o, m in pairs
        ],
        "late_joiner_first_token_ms": percentiles(late),
        "sampled_to_read_ms": {
            "alone": percentiles(after_alone),
            f"beside {others}": percentiles(after),
        },
        "answers": (rounds + 1) * len(servers) * TEXTS,
        "answers_unlike_predict": different,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--batching", default="exact", choices=("exact", "padded"))
    parser.add_argument("--threads", type=int, help="default: the recipe's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    asked = ["--batching", args.batching]
    asked += [] if args.threads is None else ["--threads", str(args.threads)]
    with Bundle(args.bundle, threads=args.threads) as bundle:
        model, options = (
            str(bundle.manifest["name"]),
            Options(NEW, do_sample=False, ignore_eos=True),
        )
        expected = [bundle.generate([p], options)[0].text for p in prompts()]
        size = bundle.size
    with ExitStack() as stack:
        servers = {s: stack.enter_context(server(args.bundle, s, asked)) for s in SLOTS}
        document = asyncio.run(measured(servers, model, expected, args.rounds))
    document = {
        "machine": describe_machine().to_json(),
        "model": model,
        "model_bytes": size,
        "warmed_up": {str(s): served.start for s, served in servers.items()},
        **document,
    }
    text = json.dumps(document, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    return int(args.batching == "exact" and document["answers_unlike_predict"] > 0)


if __name__ == "__main__":
    raise SystemExit(main())
