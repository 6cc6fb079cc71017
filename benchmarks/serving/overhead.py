"""Overhead of serving a bundle, beside other servers, and behaviour at three times the capacity.

    python -m benchmarks.serving.overhead BUNDLE --part peers [--peer litserve=PYTHON ...]
                                 [--workers 2] [--peer-threads 1 ...] [--out FILE]
    python -m benchmarks.serving.overhead BUNDLE --part overload [--seconds 60] [--out FILE]

peers     Systems: ours, each peer (peers/: the same bundle, in its own environment) and ours again,
          with batches and without; ours also with --workers, which share the machine's threads, and
          peers also with --peer-threads of the session.
          Overhead: one text at a time by `predict` in this process and by HTTP on one connection,
          in turns of 10; the overhead is the difference of the medians.
          Highest rate, with batches: requests come at random (Poisson), and 99 % must be answered
          within 3 times the median at 4 requests a second. A refused or lost request counts as not
          answered. The rate is searched to 10 %, and missed when two runs miss it.
overload  The capacity with 16 clients that each wait for their answers, then three times that rate
          at random; then the same with SIGTERM in the middle, after which the answers in the
          server's log must be those received, once each. With --apart the client and the server's
          event loop have a processor each, as with remote clients; the model's threads have all.
          At the same rate a server that only refuses (refusing.py) shows the machine's part of the
          time of a refusal: with one computing thread of SCHED_IDLE per processor, and with none.

Every answer of ours must equal `predict`'s in every bit; the batches of peers are padded, and their
answers are compared by cosine. Server and client share the machine. client.py defines the times.
Exit 1 when an answer differs or a request is lost.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.serving.client import (
    TEXTS,
    Connection,
    Lost,
    Target,
    closed_loop,
    decoded,
    of_openai,
    open_loop,
    percentiles,
)
from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.runtimes.machine import describe_machine
from optimizer.load_test.highest_rate import search

CLIENTS, TURNS, TURN = 16, 30, 10
LONE_RATE, LONE_SECONDS = 4.0, 8.0
WITHIN, SHARE = 3.0, 0.99  # times the median of lone requests; share that must be within
SEARCH_SECONDS, FEWEST = 4.0, 400  # of a run; minimum requests of a run
OVERLOAD = 3.0
PORTS = 3  # number per peer: HTTP, gRPC, metrics
ROWS = 8  # maximum per batch, our default
READY = 180.0  # seconds for a peer to start
COSINE = 0.999
PEERS = Path(__file__).with_name("peers")
REFUSING = Path(__file__).with_name("refusing.py")


def cpu(process: int) -> float:
    """Read the processor seconds of a process, user and system."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cpu_of_all(process: int) -> float:
    """Sum the processor seconds of a process and its running descendants."""
    members = [process, *(p.pid for p in psutil.Process(process).children(recursive=True))]
    total = 0.0
    for member in members:
        with suppress(OSError):  # it has ended since
            total += cpu(member)
    return total


def scheduled(process: int) -> tuple[float, float]:
    """Read seconds that a process's first thread (a server's event loop) ran and waited to run.

    See schedstat in Documentation/scheduler/sched-stats.rst of Linux.
    """
    ran, waited, _ = Path(f"/proc/{process}/task/{process}/schedstat").read_text().split()
    return int(ran) / 1e9, int(waited) / 1e9


def resident(process: int) -> float:
    """Read the resident memory of a process in MiB."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) / 1024


@dataclass
class Server:
    """Running server. log: file with a line per event."""

    process: subprocess.Popen[str]
    target: Target
    log: Path | None = None

    @property
    def lines(self) -> list[dict[str, Any]]:
        assert self.log is not None
        whole, _, _ = self.log.read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]

    def line(self, event: str) -> dict[str, Any]:
        return next(line for line in self.lines if line["event"] == event)


def ours(bundle: Path, options: list[str]) -> AbstractContextManager[Server]:
    command = [sys.executable, "-m", "optimizer", "serve", str(bundle), "--port", "0", *options]
    return serving(command)


@contextmanager
def serving(command: list[str]) -> Iterator[Server]:
    """Run a command that serves as `optimize serve` does, and wait until it is ready."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("w") as file:  # a pipe's reader would share the processors
            process = subprocess.Popen(command, stderr=file, text=True)
        server = Server(process, of_openai("", 0), log)
        try:
            while "ready" not in [line["event"] for line in server.lines]:
                if process.poll() is not None:
                    raise RuntimeError(log.read_text()[-300:])
                time.sleep(0.2)
            model, port = server.line("ready")["model"], server.line("listening")["port"]
            server.target = of_openai(model, port)
            yield server
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def peer_target(name: str, port: int) -> Target:
    def v2(text: str) -> Mapping[str, Any]:
        tensor = {"name": "text", "datatype": "BYTES", "shape": [1], "data": [text]}
        return {"inputs": [tensor]}

    def one(text: str) -> Mapping[str, Any]:
        return {"input": text}

    return {
        "litserve": Target(port, "/predict", one, lambda d: decoded(d["embedding"])),
        "mlserver": Target(
            port, "/v2/models/embedding/infer", v2, lambda d: decoded(d["outputs"][0]["data"][0])
        ),
        "bentoml": Target(port, "/embed", lambda t: {"texts": [t]}, lambda d: decoded(d[0])),
        "ray": Target(port, "/", one, lambda d: decoded(d["embedding"])),
    }[name]


@contextmanager
def peer(
    name: str, python: str, bundle: Path, port: int, rows: int, threads: int
) -> Iterator[Server]:
    """Start a peer's server and wait until it answers.

    threads: threads of the session; 0 for one per processor

    Raises RuntimeError with its output where it does not answer.
    """
    numbers = [str(n) for n in (port, rows, threads)]
    command = [python, str(PEERS / f"{name}_.py"), str(bundle.resolve()), *numbers]
    environment = {**os.environ, "PYTHONPATH": str(bundle.resolve())}  # for its harness
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(
            command,
            stdout=said,
            stderr=said,
            text=True,
            start_new_session=True,
            env=environment,
        )
        server = Server(process, peer_target(name, port))
        try:
            end = time.monotonic() + READY
            while not asyncio.run(_answers(server.target)):
                if process.poll() is not None or time.monotonic() > end:
                    said.seek(0)
                    raise RuntimeError(said.read().strip()[-300:] or f"{name} does not answer")
                time.sleep(0.5)
            yield server
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """End a process and its descendants, which may be in process groups of their own."""
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(20)
    process.kill()
    for member in family:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


def free_ports(count: int) -> int:
    """Find the first of `count` consecutive free ports."""
    while True:
        with ExitStack() as stack:
            first = 0
            for i in range(count):
                listener = stack.enter_context(socket.socket())
                try:
                    listener.bind(("127.0.0.1", first and first + i))
                except OSError:
                    break
                first = first or int(listener.getsockname()[1])
            else:
                return first


async def _answers(target: Target) -> bool:
    connection = Connection(target)
    try:
        return (await connection.ask(TEXTS[0])).status == 200
    except (OSError, Lost, TimeoutError):
        return False
    finally:
        connection.close()


async def overhead(bundle: Bundle, server: Server) -> dict[str, Any]:
    """Time `predict` and HTTP in turns, one text at a time.

    The first of a turn does not count: threads of the other side still spin after their last run.
    """
    alone, served, in_server = list[float](), list[float](), list[float]()
    connection = Connection(server.target)
    await connection.ask(TEXTS[0])
    before = cpu_of_all(server.process.pid)
    for _ in range(TURNS):
        for i in range(TURN + 1):
            start = time.perf_counter()
            bundle.predict([TEXTS[i % len(TEXTS)]])
            alone += [time.perf_counter() - start] * (i > 0)
        for i in range(TURN + 1):
            start = time.perf_counter()
            reply = await connection.ask(TEXTS[i % len(TEXTS)])
            served += [time.perf_counter() - start] * (i > 0)
            in_server += [reply.in_server] * (i > 0)
    spent = cpu_of_all(server.process.pid) - before
    connection.close()
    medians = [percentiles(times)["p50"] for times in (served, in_server, alone)]
    return {
        "predict_ms": percentiles(alone),
        "served_ms": percentiles(served),
        "in_server_ms": percentiles(in_server),
        "overhead_ms": round(medians[0] - medians[2], 2),
        "overhead_in_server_ms": round(medians[1] - medians[2], 2),
        "served_cpu_ms": round(1000 * spent / (TURNS * (TURN + 1)), 2),
    }


def highest(target: Target, same: Callable[[str, bytes], bool]) -> dict[str, Any]:
    """Search the highest rate at which 99 % of requests are answered within the limit."""
    lone = percentiles(asyncio.run(open_loop(target, LONE_RATE, LONE_SECONDS, same)).waited[200])
    limit, runs = WITHIN * lone["p50"] / 1000, list[dict[str, Any]]()

    def met(rate: float) -> bool:
        seconds = max(SEARCH_SECONDS, FEWEST / rate)
        run = asyncio.run(open_loop(target, rate, seconds, same, seed=len(runs)))
        share, times = run.within(limit), percentiles(run.waited.get(200, []))
        runs.append({"rate": round(rate, 1), "within": round(share, 4), **run.outcomes, **times})
        return share >= SHARE

    capacity = asyncio.run(closed_loop(target, CLIENTS, SEARCH_SECONDS / 2))

    def verdict(rate: float) -> Any:  # above the capacity only the queue grows
        return "pass" if rate < capacity and (met(rate) or met(rate)) else "fail"

    found = search(verdict, capacity / 2, capacity / 32)
    return {
        "lone_ms": lone,
        "capacity": round(capacity, 1),
        "limit_ms": round(1000 * limit, 2),
        "highest_rate": found.met and round(found.met, 1),
        "missed": found.missed and round(found.missed, 1),
        "wrong": sum(run.get("wrong", 0) for run in runs),
        "runs": runs,
    }


def compared(bundle: Bundle) -> tuple[Callable[[str, bytes], bool], Callable[[str, bytes], bool]]:
    """Make two comparisons of embeddings with predict's: in every bit, and by cosine."""
    expected = {t: np.array(bundle.predict([t])[0]["embedding"], "<f4") for t in TEXTS}

    def near(text: str, data: bytes) -> bool:
        one, other = expected[text], np.frombuffer(data, "<f4")
        return float(one @ other) >= COSINE * float(np.linalg.norm(one) * np.linalg.norm(other))

    return (lambda text, data: data == expected[text].tobytes()), near


def peers(args: argparse.Namespace, bundle: Bundle) -> dict[str, Any]:
    exact, near = compared(bundle)
    rows: dict[str, Any] = {}
    own = [("ours", "", ROWS, n) for n in dict.fromkeys((1, args.workers))]
    places = [*own, *((n, python, ROWS, 0) for n, python in args.peer.items())]
    places += [(n, p, ROWS, t) for n, p in args.peer.items() for t in args.peer_threads]
    places += [*own, ("ours", "", 1, 1), *((n, p, 1, 0) for n, p in args.peer.items())]
    for name, python, batch, parallel in places:
        title = f"{name}, {'one at a time' if batch == 1 else f'batches of up to {batch}'}"
        if name == "ours":
            title += f", {parallel} workers" * (parallel > 1)
        else:
            title += f", {parallel} threads" * (parallel > 0)
        title += ", again" * (title in rows)
        options = ["--rows", str(batch), "--workers", str(parallel), *args.option]
        try:
            with (
                ours(args.bundle, options)
                if name == "ours"
                else peer(name, python, args.bundle, free_ports(PORTS), batch, parallel)
            ) as server:
                found = asyncio.run(overhead(bundle, server))
                if batch > 1:
                    found |= highest(server.target, exact if name == "ours" else near)
        except (RuntimeError, OSError, Lost) as e:
            found = {"failed": str(e)}
        rows[title] = found
        print(title, json.dumps({k: v for k, v in found.items() if k != "runs"}), flush=True)
        if args.out:  # after each, as a peer may hang
            args.out.write_text(json.dumps({"servers": rows}, indent=1))
    return {"servers": rows}


async def _watched(process: int, seconds: float) -> list[float]:
    """Read the resident memory in MiB each second."""
    sizes, end = list[float](), time.monotonic() + seconds
    while time.monotonic() < end:
        sizes.append(round(resident(process), 1))
        await asyncio.sleep(1.0)
    return sizes


@contextmanager
def started(args: argparse.Namespace) -> Iterator[Server]:
    """Start our server for an overload.

    On Linux affinity belongs to a thread, and a process id names its first thread, the event loop.
    """
    with ours(args.bundle, args.option) as server, _apart(args, server.process.pid):
        yield server


@contextmanager
def _apart(args: argparse.Namespace, server: int) -> Iterator[None]:
    every = os.sched_getaffinity(0)
    if args.apart:
        os.sched_setaffinity(server, {min(every)})
        os.sched_setaffinity(0, {max(every)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, every)


def refusing(args: argparse.Namespace, rate: float, load: str) -> dict[str, Any]:
    """Measure a server that only refuses."""
    port = free_ports(1)
    command = [sys.executable, str(REFUSING), str(port), str(os.cpu_count()), load]
    process = subprocess.Popen(command, text=True)
    target, end = of_openai("none", port), time.monotonic() + READY
    try:
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("refusing.py did not start")
            time.sleep(0.2)
        with _apart(args, process.pid):
            asyncio.run(open_loop(target, rate, args.seconds / 12, lambda *_: False))
            before = scheduled(process.pid)
            run = asyncio.run(open_loop(target, rate, args.seconds / 3, lambda *_: False))
            ran, waited = (
                round(after - start, 2)
                for start, after in zip(before, scheduled(process.pid), strict=True)
            )
    finally:
        _end(process)
    loop = {"ran": ran, "waited_for_a_processor": waited}
    return {**run.to_json(), "event_loop_seconds": loop}


def _listens(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def overload(args: argparse.Namespace, bundle: Bundle) -> dict[str, Any]:
    exact, _ = compared(bundle)
    with started(args) as server:
        warmed_up = server.line("warmed_up")
        promise = args.p99_ms or 2 * warmed_up["max_wait_ms"] + warmed_up["full_batch_ms"]
        capacity = asyncio.run(closed_loop(server.target, CLIENTS, args.seconds / 6))
        asyncio.run(open_loop(server.target, OVERLOAD * capacity, args.seconds / 12, exact))

        async def both() -> Any:
            return await asyncio.gather(
                open_loop(server.target, OVERLOAD * capacity, args.seconds, exact, seed=1),
                _watched(server.process.pid, args.seconds),
            )

        before, loop = cpu(server.process.pid), scheduled(server.process.pid)
        run, sizes = asyncio.run(both())
        ran, waited = (
            round(after - start, 2)
            for start, after in zip(loop, scheduled(server.process.pid), strict=True)
        )
        document = {
            "capacity": round(capacity, 1),
            "p99_limit_ms": round(promise, 1),
            "overload": run.to_json(),
            "server_cpu_seconds": round(cpu(server.process.pid) - before, 1),
            "event_loop_seconds": {"ran": ran, "waited_for_a_processor": waited},
            "resident_mib": [min(sizes), max(sizes)],
        }
    only = {load: refusing(args, OVERLOAD * capacity, load) for load in ("idle", "none")}
    return document | {"only_refusing": only, "sigterm": _ended(args, capacity, exact)}


def _ended(
    args: argparse.Namespace, capacity: float, exact: Callable[[str, bytes], bool]
) -> dict[str, Any]:
    """Send SIGTERM in the middle of an overload, and compare the log with the answers received."""
    seconds = args.seconds / 6
    with started(args) as server:

        async def both() -> Any:
            async def end() -> None:
                await asyncio.sleep(seconds / 2)
                server.process.send_signal(signal.SIGTERM)

            rate = OVERLOAD * capacity
            return await asyncio.gather(open_loop(server.target, rate, seconds, exact), end())

        run, _ = asyncio.run(both())
        server.process.wait(60)
        logged = [line for line in server.lines if line["event"] == "request"]
    answered = [line["request_id"] for line in logged if line["status"] == 200]
    came = [identity for identity, status in run.status.items() if status == 200]
    return {
        "outcomes": dict(run.outcomes),
        "exit": server.process.returncode,
        "answered_in_the_log": len(answered),
        "and_came": len({*answered} & {*came}),
        "logged_twice": len(logged) - len({line["request_id"] for line in logged}),
        "lost_after_they_were_logged": len({*run.lost} & {line["request_id"] for line in logged}),
    }


def _peer(text: str) -> tuple[str, str]:
    name, _, python = text.partition("=")
    return name, python


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--part", choices=("peers", "overload"), required=True)
    parser.add_argument("--peer", type=_peer, action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--workers", type=int, default=1, help="further number of workers of ours")
    parser.add_argument("--peer-threads", type=int, action="append", default=[])
    parser.add_argument("--option", action="append", default=[], help="of our `serve`; repeatable")
    parser.add_argument(
        "--apart", action="store_true", help="client and event loop: a processor each"
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--p99-ms", type=float, help="limit, from the server's by default")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    args.peer = dict(args.peer)
    with Bundle(args.bundle) as bundle:
        document = {"machine": describe_machine().to_json(), "engine": bundle.engine["target"]}
        document |= {"load": os.getloadavg(), "options": args.option, "apart": args.apart}
        document |= (peers if args.part == "peers" else overload)(args, bundle)
    text = json.dumps(document, indent=1)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")
    if args.part == "peers":
        return int(any(row.get("wrong") for row in document["servers"].values()))
    ended = document["sigterm"]
    good = {*document["overload"]["outcomes"]} <= {"200", "429", "503"}
    good &= ended["answered_in_the_log"] == ended["and_came"]
    return int(not good or ended["lost_after_they_were_logged"] or "wrong" in ended["outcomes"])


if __name__ == "__main__":
    raise SystemExit(main())
