"""Servers on the loopback: in a thread of this process, or programs with a port of their own."""

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
    """Connections stay open, and nothing is written to stderr."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        """Nothing on stderr."""


@contextmanager
def answering(server: ThreadingHTTPServer) -> Iterator[None]:
    """The server answers in a thread; it is closed at the end."""
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
    """One that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def program(words: Sequence[object], port: int, log: Path) -> Iterator[None]:
    """A program that listens on the port, killed at the end. Raises RuntimeError with its log when
    it does not listen within a minute."""
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
