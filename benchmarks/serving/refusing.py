"""A server that refuses everything, beside threads that compute without end.

    python -m benchmarks.serving.refusing PORT THREADS {idle|none}

idle: the threads are of SCHED_IDLE: they have what nothing else wants. What a client sees of it is
the least that any server of this language can show on this machine beside such a load: each request
costs it a status line. Used by `overhead.py --part overload`.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

BODY = b'{"error": {"message": "busy"}}'
HEADERS = [(b"content-type", b"application/json"), (b"retry-after", b"1")]


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """ASGI 3: 429, once the body is read."""
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
    """Products of matrices, outside the interpreter's lock, with what nothing else wants."""
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
