"""What serving a bundle adds to its model, and what becomes of three times the load it can answer.

    python benchmarks/serving.py BUNDLE [--seconds 20] [--out FILE]

One text at a time through `predict` in this process and through HTTP on one connection, turn by
turn: the difference of the medians is the overhead. Then the capacity with 16 clients that each
wait for their answers, and an open loop: requests at random (Poisson) at three times the capacity,
each timed from the instant it was to be sent. Every answer is compared with `predict`'s in every
bit. Server and client share the machine. Exit 1 when an answer differs or a request is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.harness.bundle import Bundle
from optimizer.harness.machine import this_machine

TEXTS = (
    "The service was quick and the staff could not have been friendlier.",
    "I waited forty minutes for a cold meal, and nobody said a word about it.",
    "It arrived on time; the battery lasts two days, which is what was promised.",
    "After a slow first half the story finds its feet and ends better than it began.",
)
CLIENTS, ROUNDS, WARM_UP = 16, 300, 30


class Connection:
    """One keep-alive connection to the server."""

    def __init__(self, port: int, model: str) -> None:
        self.port, self.model = port, model
        self.reader: asyncio.StreamReader | None = None

    async def ask(self, text: str) -> tuple[int, bytes]:
        """(status, body)."""
        if self.reader is None or self.reader.at_eof():  # the server ends idle ones
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        document = {"model": self.model, "input": text, "encoding_format": "base64"}
        body = json.dumps(document).encode()
        head = f"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)
        answer = (await self.reader.readuntil(b"\r\n\r\n")).lower()
        length = int(answer.split(b"content-length: ")[1].split(b"\r\n")[0])
        return int(answer.split(b" ", 2)[1]), await self.reader.readexactly(length)


def embedding(body: bytes) -> bytes:
    import base64

    return base64.b64decode(json.loads(body)["data"][0]["embedding"])


def percentiles(seconds: list[float]) -> dict[str, float]:
    """In ms."""
    if not seconds:
        return {}
    return {f"p{p}": round(1000 * float(np.percentile(seconds, p)), 2) for p in (10, 50, 90, 99)}


def cpu(process: int) -> float:
    """Seconds of the process so far, user and system."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def overhead(bundle: Bundle, connection: Connection, process: int) -> dict[str, Any]:
    """One at a time, in turn. CPU time too: the machine may have other work."""
    alone, served = list[float](), list[float]()
    spent = 0.0
    for i in range(WARM_UP + ROUNDS):
        text = TEXTS[i % len(TEXTS)]
        if i == WARM_UP:
            server_cpu = cpu(process)
        start, own = time.perf_counter(), time.process_time()
        bundle.predict([text])
        middle, own = time.perf_counter(), time.process_time() - own
        await connection.ask(text)
        if i >= WARM_UP:
            spent += own
            alone.append(middle - start)
            served.append(time.perf_counter() - middle)
    extra = [s - a for a, s in zip(alone, served, strict=True)]
    return {
        "predict_cpu_ms": round(1000 * spent / ROUNDS, 3),
        "served_cpu_ms": round(1000 * (cpu(process) - server_cpu) / ROUNDS, 3),
        "predict_ms": percentiles(alone),
        "served_ms": percentiles(served),
        "difference_of_p10_ms": round(percentiles(served)["p10"] - percentiles(alone)["p10"], 2),
        "difference_of_medians_ms": round(
            percentiles(served)["p50"] - percentiles(alone)["p50"], 2
        ),
        "median_of_differences_ms": percentiles(extra)["p50"],
    }


async def capacity(port: int, model: str, seconds: float) -> float:
    """Requests a second that clients get which each wait for their answers."""
    answered, end = 0, time.perf_counter() + seconds

    async def client(number: int) -> None:
        nonlocal answered
        connection = Connection(port, model)
        while time.perf_counter() < end:
            status, _ = await connection.ask(TEXTS[number % len(TEXTS)])
            answered += status == 200

    await asyncio.gather(*map(client, range(CLIENTS)))
    return answered / seconds


async def open_loop(
    port: int, model: str, rate: float, seconds: float, expected: dict[str, bytes]
) -> dict[str, Any]:
    """Requests at random instants whether or not earlier ones are answered."""
    chance, idle = random.Random(0), list[Connection]()
    times: dict[int, list[float]] = {200: [], 429: []}
    outcomes: Counter[str] = Counter()

    async def one(text: str, due: float) -> None:
        connection = idle.pop() if idle else Connection(port, model)
        try:
            status, body = await asyncio.wait_for(connection.ask(text), 60)
        except (OSError, EOFError, TimeoutError) as e:
            outcomes[f"lost: {type(e).__name__}"] += 1
            return
        idle.append(connection)
        times.setdefault(status, []).append(time.perf_counter() - due)
        same = status != 200 or embedding(body) == expected[text]
        outcomes[str(status) if same else "wrong"] += 1

    due, tasks = time.perf_counter(), set[asyncio.Task[None]]()
    end = due + seconds
    while (due := due + chance.expovariate(rate)) < end:
        await asyncio.sleep(max(due - time.perf_counter(), 0))
        tasks.add(asyncio.create_task(one(chance.choice(TEXTS), due)))
    await asyncio.gather(*tasks)
    return {
        "rate": round(rate, 1),
        "sent": len(tasks),
        "outcomes": dict(outcomes),
        "accepted_ms": percentiles(times[200]),
        "refused_ms": percentiles(times[429]),
    }


def resident(process: int) -> int:
    """MiB."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) >> 10


def in_the_server(lines: list[str]) -> dict[str, Any]:
    """How long requests took from the server's side, by status: what its log says of the last."""
    times: dict[int, list[float]] = {}
    for line in map(json.loads, lines):
        if line.get("route") == "v1 embeddings":
            times.setdefault(line["status"], []).append(line["ms"] / 1000)
    return {f"{status}_ms": percentiles(seconds) for status, seconds in times.items()}


async def measured(args: argparse.Namespace, port: int, process: int) -> dict[str, Any]:
    with Bundle(args.bundle) as bundle:
        expected = {
            t: np.array(bundle.predict([t])[0]["embedding"], "<f4").tobytes() for t in TEXTS
        }
        model = str(bundle.manifest["name"])
        document = {
            "machine": this_machine().to_json(),
            "engine": bundle.engine["target"],
            "overhead": await overhead(bundle, Connection(port, model), process),
        }
    document["capacity"] = await capacity(port, model, args.seconds / 2)
    before = resident(process)
    rate = 3 * document["capacity"]
    document["overload"] = await open_loop(port, model, rate, args.seconds, expected)
    document["resident_mib"] = [before, resident(process)]
    return document


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--plain", action="store_true", help="the standard library's HTTP")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    command = [sys.executable, "-m", "optimizer", "serve", str(args.bundle), "--port", "0"]
    command += ["--plain"] if args.plain else []
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    port, http, line = 0, "", {}
    while line.get("event") != "ready":
        line = json.loads(server.stderr.readline())
        port, http = line.get("port", port), line.get("http", http)
    lines: list[str] = []
    log = threading.Thread(target=lambda: lines.extend(server.stderr or ()))
    log.start()
    try:
        document = {"http": http, **asyncio.run(measured(args, port, server.pid))}
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
        log.join(60)
    document["overload"]["in_the_server"] = in_the_server(lines[-document["overload"]["sent"] :])
    text = json.dumps(document, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    outcomes = document["overload"]["outcomes"]
    return int(bool({*outcomes} - {"200", "429", "503"}))


if __name__ == "__main__":
    raise SystemExit(main())
