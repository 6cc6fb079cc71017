"""python -m harness serve in a bundle: started, asked, ended by SIGTERM in the middle."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest


def started(bundle: Path, *arguments: str) -> tuple[subprocess.Popen[str], int, list[Any]]:
    """The server's process once it is ready, its port, and its log lines as they come."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COV"))}
    command = [sys.executable, "-B", "-m", "harness", "serve", "--port", "0", *arguments]
    process = subprocess.Popen(
        command, cwd=bundle, env=environment, stderr=subprocess.PIPE, text=True
    )
    lines: list[Any] = []
    ready = threading.Event()

    def follow() -> None:
        for line in process.stderr or ():
            lines.append(json.loads(line))
            if lines[-1]["event"] == "ready":
                ready.set()

    threading.Thread(target=follow, daemon=True).start()
    assert ready.wait(60), lines
    (port,) = [line["port"] for line in lines if "port" in line]
    return process, port, lines


def embedded(port: int, text: str) -> Any:
    body = json.dumps({"model": "tiny", "input": text}).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/embeddings", body)
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)["data"][0]["embedding"]


def wait_for_rows(port: int, rows: int) -> None:
    """Wait until this number of rows is accepted and not yet answered."""
    name = "nv_inference_pending_request_count"
    for _ in range(600):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
            lines = reply.read().decode().splitlines()
        pending = [float(x.rsplit(" ", 1)[1]) for x in lines if x.startswith(name)]
        if sum(pending) == rows:
            return
        time.sleep(0.05)
    raise AssertionError(f"{rows} rows were never pending together: {lines}")


def test_a_bundle_serves_and_ends_on_sigterm_with_every_accepted_request_answered(
    bundle: Path,
) -> None:
    process, port, lines = started(bundle, "--delay-ms", "2000", "--max-wait", "60")
    try:
        with ThreadPoolExecutor(6) as pool:
            waiting = [pool.submit(embedded, port, "good " * n) for n in range(1, 7)]
            wait_for_rows(port, 6)
            process.send_signal(signal.SIGTERM)
            embeddings = [future.result() for future in waiting]
        assert [len(e) for e in embeddings] == [32] * 6
        told = [(x["event"], x.get("number"), x.get("of")) for x in lines]
        steps = [i for i, line in enumerate(lines) if line["event"] == "warming_up"]
        assert told[:2] == [("listening", None, None), ("opening", 1, 1)]
        assert told[2 : 2 + len(steps)] == [
            ("warming_up", n, len(steps)) for n in range(1, len(steps) + 1)
        ]
        assert len(steps) >= 3
        assert "seconds_left" in lines[steps[-1]]
        assert [event for event, *_ in told[2 + len(steps) :][:2]] == ["warmed_up", "ready"]
        assert process.wait(20) == 0
        assert lines[-1]["event"] == "ended"
    finally:
        process.kill()
        process.wait()
        if process.stderr:
            process.stderr.close()


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_warm_up_ends_the_server_at_once(sent: signal.Signals) -> None:
    script = """
import sys, time
from optimizer.harness.commands import serve
from optimizer.harness.commands.command_line import parse_arguments
args = parse_arguments(["serve", "--bundle", "none", "--port", "0"])
sys.exit(serve.run(lambda path, stack: time.sleep(60), args))
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stderr or ():
                if json.loads(line)["event"] == "opening":
                    break
            process.send_signal(sent)
            assert process.wait(10) == 0
            (last,) = [json.loads(line) for line in process.stderr or ()]
        finally:
            process.kill()
    assert last["event"] == "ended"
    assert "during warm-up" in last["message"]
