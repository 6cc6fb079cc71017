"""HTTP client that times requests by the kernel's clock.

On loopback, bytes are readable at the receiver when `send` returns, and the kernel records when
each packet came (SO_TIMESTAMPNS, socket(7)). Two durations of every answer are therefore exact even
while this client waits for a processor:

    in_server   from the request's bytes being readable to the answer's last byte being written
    waited      from the instant at which the request was due to this client having the answer
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from optimizer.harness.process.collection import pause_collection

SO_TIMESTAMPNS = 35  # asm-generic/socket.h; Python's socket module has no name for it
READ = 1 << 16
PATIENCE = 60.0  # seconds until an answer counts as lost
BUSY = (429, 503)
REUSED = 5.0  # maximum idle seconds of a connection; the server's are 10 (--client-seconds)
IDLE = 1.0  # idle seconds from which the message of a loss names them
TEXTS = (
    "The service was quick and the staff could not have been friendlier.",
    "I waited forty minutes for a cold meal, and nobody said a word about it.",
    "It arrived on time; the battery lasts two days, which is what was promised.",
    "After a slow first half the story finds its feet and ends better than it began.",
)


@dataclass(frozen=True)
class Target:
    """Address and format of requests.

    body: text -> document of a request
    answer: document of an answer -> float32 bytes of the embedding
    """

    port: int
    path: str
    body: Callable[[str], Any]
    answer: Callable[[Any], bytes]


@dataclass
class Reply:
    """Answer to one request.

    in_server: seconds, as the module defines them
    identity: X-Request-Id of the request
    last: True where the server closes the connection
    """

    status: int
    body: bytes
    in_server: float
    identity: str
    last: bool


class Lost(Exception):
    """The connection ended before an answer came."""


class Connection:
    """Keep-alive connection."""

    def __init__(self, target: Target) -> None:
        self._target, self._socket = target, socket.socket()
        self._socket.setblocking(False)
        self._open, self._answered = False, time.monotonic()

    async def ask(self, text: str, identity: str = "") -> Reply:
        """Send a request and return its answer. Raises Lost, OSError."""
        loop, target = asyncio.get_running_loop(), self._target
        idle = time.monotonic() - self._answered
        if not self._open:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
            await loop.sock_connect(self._socket, ("127.0.0.1", target.port))
            self._open = True
        body = json.dumps(target.body(text)).encode()
        head = (
            f"POST {target.path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"x-request-id: {identity}\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        if self._socket.send(head.encode() + body) != len(head) + len(body):
            raise Lost("the request did not fit into the socket's buffer")
        sent = time.time_ns()
        done: asyncio.Future[tuple[bytes, int]] = loop.create_future()
        loop.add_reader(self._socket, _Answer(self._socket, done).read)
        try:
            answer, written = await asyncio.wait_for(done, PATIENCE)
        except Lost as e:
            raise Lost(f"{e}{f', idle for {idle:.0f} s before' * (idle > IDLE)}") from None
        finally:
            loop.remove_reader(self._socket)
        self._answered = time.monotonic()
        head_, _, content = answer.partition(b"\r\n\r\n")
        status, last = int(head_.split(b" ", 2)[1]), b"connection: close" in head_.lower()
        if b"content-length: " not in head_.lower():
            content = _joined(content)
        return Reply(status, content, (written - sent) / 1e9, identity, last)

    @property
    def ended(self) -> bool:
        """True where the server has closed the connection, or may close it during the next request.

        A server may close between two requests (RFC 9112, 9.5); a connection that was idle for
        REUSED seconds is not used again, as in httpx.
        """
        if time.monotonic() - self._answered > REUSED:
            return True
        try:
            return self._socket.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        self._socket.close()


@dataclass
class _Answer:
    """Reader of one answer. done: called with it and the time of its last packet."""

    socket: socket.socket
    done: asyncio.Future[tuple[bytes, int]]
    data: bytearray = field(default_factory=bytearray)

    def read(self) -> None:
        if self.done.done():
            return
        try:
            part, ancillary, _, _ = self.socket.recvmsg(READ, 64)
        except BlockingIOError:
            return
        except OSError as e:
            self.done.set_exception(Lost(type(e).__name__))
            return
        self.data += part
        if not part:
            self.done.set_exception(Lost("closed"))
        elif self._whole():
            came = time.time_ns()
            if ancillary:  # the kernel starts them shortly after the first socket asks
                seconds, nanoseconds = struct.unpack("qq", ancillary[0][2][:16])
                came = seconds * 10**9 + nanoseconds
            self.done.set_result((bytes(self.data), came))

    def _whole(self) -> bool:
        head, end, body = self.data.partition(b"\r\n\r\n")
        if not end:
            return False
        lower = head.lower()
        if b"content-length: " in lower:
            length = int(lower.split(b"content-length: ")[1].split(b"\r\n")[0])
            return len(body) >= length
        return body.endswith(b"0\r\n\r\n")  # in chunks


def _joined(chunks: bytes) -> bytes:
    """Join a body in chunks (RFC 9112, 7.1)."""
    body = b""
    while chunks:
        size, _, rest = chunks.partition(b"\r\n")
        length = int(size.partition(b";")[0], 16)
        body, chunks = body + rest[:length], rest[length + 2 :]
    return body


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Compute percentiles in milliseconds."""
    if not seconds:
        return {}
    return {f"p{p}": round(1000 * float(np.percentile(seconds, p)), 2) for p in (10, 50, 90, 99)}


@dataclass
class Run:
    """Results of an open loop.

    waited, in_server: seconds by status
    status: status by identity
    lost: reason by identity
    outcomes: number by status, "wrong", or reason of a loss
    """

    rate: float
    waited: dict[int, list[float]] = field(default_factory=dict)
    in_server: dict[int, list[float]] = field(default_factory=dict)
    status: dict[str, int] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)
    outcomes: Counter[str] = field(default_factory=Counter)
    sent: int = 0

    def within(self, limit: float) -> float:
        """Compute the share of all requests that were answered within `limit` seconds."""
        return sum(w <= limit for w in self.waited.get(200, ())) / max(self.sent, 1)

    def to_json(self) -> dict[str, Any]:
        refused = {w: [t for s in BUSY for t in getattr(self, w).get(s, ())] for w in TIMES}
        return {
            "rate": round(self.rate, 1),
            "sent": self.sent,
            "outcomes": dict(self.outcomes),
            **{f"accepted_{w}_ms": percentiles(getattr(self, w).get(200, ())) for w in TIMES},
            **{f"refused_{w}_ms": percentiles(refused[w]) for w in TIMES},
            "refused_in_server_within": {
                f"{limit} ms": round(float(np.mean([1000 * t <= limit for t in refused[IN]])), 4)
                for limit in (1, 5, 10)
                if refused[IN]
            },
        }


IN = "in_server"
TIMES = ("waited", IN)


async def open_loop(
    target: Target,
    rate: float,
    seconds: float,
    same: Callable[[str, bytes], bool],
    seed: int = 0,
) -> Run:
    """Send requests at random instants (Poisson), without waiting for earlier answers.

    same: (text, embedding) -> True for the right answer
    """
    chance, idle, run = random.Random(seed), list[Connection](), Run(rate)

    async def one(text: str, due: float, identity: str) -> None:
        connection = _idle(idle) or Connection(target)
        try:
            reply = await connection.ask(text, identity)
        except (OSError, Lost, TimeoutError) as e:
            connection.close()
            run.lost[identity] = str(e) or type(e).__name__
            run.outcomes[f"lost: {run.lost[identity]}"] += 1
            return
        if reply.last:
            connection.close()
        else:
            idle.append(connection)
        run.status[identity] = reply.status
        run.waited.setdefault(reply.status, []).append(time.perf_counter() - due)
        run.in_server.setdefault(reply.status, []).append(reply.in_server)
        right = reply.status != 200 or same(text, target.answer(json.loads(reply.body)))
        run.outcomes[str(reply.status) if right else "wrong"] += 1

    with pause_collection():  # requests due during a collection would be sent in a burst
        due, tasks = time.perf_counter(), set[asyncio.Task[None]]()
        end = due + seconds
        while (due := due + chance.expovariate(rate)) < end:
            await asyncio.sleep(max(due - time.perf_counter(), 0))
            task = asyncio.create_task(one(chance.choice(TEXTS), due, f"{seed}-{run.sent}"))
            run.sent += 1
            tasks.add(task)
        await asyncio.gather(*tasks)
    for connection in idle:
        connection.close()
    return run


def _idle(connections: list[Connection]) -> Connection | None:
    """Take the most recently used connection that is still open."""
    while connections:
        connection = connections.pop()
        if not connection.ended:
            return connection
        connection.close()
    return None


async def closed_loop(target: Target, clients: int, seconds: float) -> float:
    """Measure requests per second of clients that each wait for their answers."""
    answered, end = 0, time.perf_counter() + seconds

    async def client(number: int) -> None:
        nonlocal answered
        connection = Connection(target)
        while time.perf_counter() < end:
            reply = await connection.ask(TEXTS[number % len(TEXTS)])
            answered += reply.status == 200
        connection.close()

    await asyncio.gather(*map(client, range(clients)))
    return answered / seconds


def of_openai(model: str, port: int) -> Target:
    """Make the target of our server: POST /v1/embeddings."""

    def body(text: str) -> Mapping[str, Any]:
        return {"model": model, "input": text, "encoding_format": "base64"}

    return Target(port, "/v1/embeddings", body, lambda d: decoded(d["data"][0]["embedding"]))


def decoded(text: str) -> bytes:
    import base64

    return base64.b64decode(text)
