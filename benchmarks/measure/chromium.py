"""Headless Chromium, driven through a pipe by the DevTools protocol, without port or package."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


def program() -> str | None:
    """Find the path of a Chromium; None if it is not installed."""
    return next((path for name in PROGRAMS if (path := shutil.which(name))), None)


class Chromium:
    """Browser with one page.

    folder: folder of the profile
    timeout: maximum seconds of a call

    Raises AssertionError where a script of the page throws, and TimeoutError.
    """

    def __init__(self, folder: Path, timeout: float = 120) -> None:
        self._timeout, self._buffer, self._count = timeout, b"", 0
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        options = "--headless=new --no-sandbox --disable-gpu --no-first-run --remote-debugging-pipe"
        pipes = f"3<&{theirs_in} 4>&{theirs_out}"
        command = f'exec "$0" {options} --user-data-dir="$1" about:blank {pipes}'
        self._process = subprocess.Popen(
            ["bash", "-c", command, str(program()), str(folder)],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self._call("Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session = attached["sessionId"]

    def open(self, address: str) -> None:
        """Open an address and wait until the page's promise `page.ready` is settled."""
        self._call("Page.navigate", {"url": address}, page=True)
        end = time.monotonic() + self._timeout
        state = "document.documentElement?.dataset.state ?? 'none'"
        while self.evaluate(state) in ("none", "loading"):
            if time.monotonic() > end:
                raise TimeoutError(self.evaluate("document.body.innerText"))
            time.sleep(0.05)

    def leave(self) -> None:
        """Open an empty page, which frees the page before."""
        self._call("Page.navigate", {"url": "about:blank"}, page=True)
        time.sleep(1)

    def evaluate(self, expression: str) -> Any:
        """Evaluate an expression, and wait for it if it is a promise."""
        options = {"expression": expression, "awaitPromise": True, "returnByValue": True}
        result = self._call("Runtime.evaluate", options, page=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def processor_seconds(self) -> float:
        """Sum user and system seconds of the browser's processes."""
        every = [own := psutil.Process(self._process.pid), *own.children(recursive=True)]
        return sum(t.user + t.system for t in (p.cpu_times() for p in every))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)
        os.close(self._in)
        os.close(self._out)

    def _call(self, method: str, options: dict[str, Any], *, page: bool = False) -> Any:
        self._count += 1
        message = {"id": self._count, "method": method, "params": options}
        if page:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            reply = json.loads(self._message())
            if reply.get("id") == self._count:
                assert "error" not in reply, reply["error"]
                return reply["result"]

    def _message(self) -> bytes:
        end = time.monotonic() + self._timeout
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(end - time.monotonic(), 0))
            piece = os.read(self._in, 1 << 20) if ready else b""
            if not piece:
                raise TimeoutError("Chromium does not answer")
            self._buffer += piece
        message, _, self._buffer = self._buffer.partition(b"\0")
        return message
