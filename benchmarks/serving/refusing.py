"""Server that refuses every request, with threads that compute meanwhile.

    python -m benchmarks.serving.refusing PORT THREADS {idle|none}

idle: THREADS threads of SCHED_IDLE compute in processor time that nothing else needs. Its times are
a lower bound for a Python server on this machine with such a load: each request costs it only a
status line. Used by `overhead.py --part overload`.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

BODY = b'{"error": {"message": "busy"}}'
HEADERS = [(b"content-type", b"application/json"), (b"retry-after", b"1")]


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answer 429 once the body is read (ASGI 3)."""
    if scope["type"] != "http":
        return
    while (await receive()).get("more_body"):
        pass
    length = (b"content-length", str(len(BODY)).encode())
    identity = [pair for pair in scope["headers"] if pair[0] == b"x-request-id"]
    start = {"type": "http.response.start", "status": 429}
    await send({**start, "headers": [*HEADERS, length, *identity]})
    await send({"type": "http.response.body", "body": BODY})


def compute() -> None:
    """Multiply matrices without the interpreter's lock, in idle processor time."""
    import numpy as np

    os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
    a, b = (np.ones((1024, 1024), np.float32) for _ in range(2))
    out = np.empty_like(a)
    while True:
        np.matmul(a, b, out=out)


def main() -> None:
    port, threads, load = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before numpy is loaded
    import uvicorn

    if load == "idle":
        for _ in range(threads):
            threading.Thread(target=compute, daemon=True).start()
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", access_log=False)


if __name__ == "__main__":
    main()
