"""Start servers on the loopback interface, in a thread or as programs."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any


class QuietHandler(BaseHTTPRequestHandler):
    """HTTP handler with persistent connections and without a log."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        """Write nothing to stderr."""


@contextmanager
def answering(server: ThreadingHTTPServer) -> Iterator[None]:
    """Run the server in a thread, and close it at the end."""
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    with server:
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


def url(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def program(words: Sequence[object], port: int, log: Path) -> Iterator[None]:
    """Run a program that listens on the port, and kill it at the end. Raises RuntimeError with its
    log if it does not listen within a minute."""
    with log.open("w") as file:
        process = subprocess.Popen([str(w) for w in words], stdout=file, stderr=file)
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        else:
            raise RuntimeError(f"{words[0]} does not listen: {log.read_text()[-2000:]}")
        yield
    finally:
        process.kill()
        process.wait()
