"""Run a bundle's own server on a free port of this machine, for the time of a test."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optimizer.foundation.errors import InputError, MachineError

END = 60.0  # seconds in which the server finishes accepted requests before it is killed


@dataclass(frozen=True)
class RunningServer:
    """Server under load test that is ready.

    grpc: gRPC address, valid only if the options have --grpc-port
    name: name of the model
    process: process id
    warmed_up: document of its log line `warmed_up`, with the measurements of the warm-up
    """

    url: str
    grpc: str
    name: str
    process: int
    warmed_up: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def run_server(bundle: Path, options: Sequence[str] = ()) -> Iterator[RunningServer]:
    """Start the server under load test, wait until it is ready, and stop it at the end. If it does
    not get ready, raises InputError where the bundle is wrong, else MachineError, with the server's
    last log line. options: options of `optimize serve`."""
    command = [sys.executable, "-m", "optimizer", "serve", str(bundle), "--port", "0", *options]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    log = threading.Thread(target=lambda: None)
    try:
        port, grpc_port, event, line = 0, 0, "", ""
        warmed_up: dict[str, Any] = {}
        while event != "ready":
            before, line = line, server.stderr.readline()
            if not line:
                code = server.wait(END)
                kind = InputError if code == InputError.exit_code else MachineError
                message = f"the server ended with {code}: {before.strip()[:400]}"
                raise kind(message, where=f"optimize serve {bundle}")
            try:
                document = json.loads(line)
                event, port = document["event"], document.get("port", port)
                grpc_port = document.get("grpc_port", grpc_port)
            except (ValueError, LookupError, TypeError):
                continue
            warmed_up = document if event == "warmed_up" else warmed_up
        errors = server.stderr
        log = threading.Thread(target=lambda: [None for _ in errors])  # a full pipe would block it
        log.start()
        addresses = f"http://127.0.0.1:{port}", f"grpc://127.0.0.1:{grpc_port}"
        yield RunningServer(*addresses, document["model"], server.pid, warmed_up)
    finally:
        server.terminate()
        try:
            server.wait(END)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        if log.is_alive():
            log.join()
        server.stderr.close()
