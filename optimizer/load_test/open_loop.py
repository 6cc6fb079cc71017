"""Send requests when they are due, and record the reply to each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

from optimizer.foundation.errors import InputError
from optimizer.harness.process.collection import pause_collection
from optimizer.load_test.requests import RequestKind

REFUSED = (429, 503)  # HTTP statuses; a gRPC call that is refused for load has 503 too


@dataclass
class Reply:
    """Reply of the tested server to one request. All times are in seconds from the start of the
    run.

    due, sent, ended: when the request was due and sent, and when its answer ended
    pieces: arrival of each piece of a streamed answer, else of the answer
    status: HTTP status; 0: no answer came
    answer: compared part of the answer (requests.py)
    lost: reason why no complete answer came, or ""
    """

    due: float
    sent: float = 0.0
    pieces: list[float] = field(default_factory=list)
    ended: float = 0.0
    status: int = 0
    answer: str = ""
    lost: str = ""


Metadata = Mapping[str, Any]  # name, datatype and shape of one model input


class Client(Protocol):
    """Client by which a load test sends requests to a server, used as an async context manager."""

    url: str

    async def __aenter__(self) -> Client: ...
    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None: ...

    async def model(self) -> str:
        """Return the name of the model under load test. Raises MachineError where nothing answers,
        and InputError where the answer is not what such a server sends."""

    async def inputs(self, model: str) -> Sequence[Metadata]:
        """Ask the server under test for the model's inputs by the Open Inference Protocol; [] from
        other servers."""

    async def kind(self, model: str, column: str, value: str) -> RequestKind:
        """Return the kind of a load test's requests for inputs of this column, after trying it with
        `value`. Raises InputError where the server does not answer."""

    async def ask(
        self, kind: RequestKind, model: str, value: str, reply: Reply, start: float
    ) -> Reply:
        """Send the server under test one request now, fill in `reply` and return it.

        start: time.perf_counter() at the start of the run
        """


async def ask_alone(
    client: Client, kind: RequestKind, model: str, values: Sequence[str]
) -> dict[str, str]:
    """Send the server under test each input with no other request running. Returns {input: answer}.
    Raises InputError for an input without an answer."""
    expected = {}
    for value in values:
        reply = await client.ask(kind, model, value, Reply(0.0), time.perf_counter())
        if reply.status != 200 or reply.lost:
            raise InputError(
                f"status {reply.status} {reply.lost}".strip(),
                where=f"the {kind.column} {value[:40]!r}, sent alone",
                fix=f"Give {kind.column}s that the model answers.",
            )
        expected[value] = reply.answer
    return expected


async def send_all(
    client: Client, kind: RequestKind, model: str, values: Sequence[str], due: Sequence[float]
) -> list[Reply]:
    """Send the server under test a request at each instant of `due`, cycling through `values`;
    return all replies."""
    replies = [Reply(instant) for instant in due]
    with pause_collection():
        start = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for i, reply in enumerate(replies):
                wait = reply.due - (time.perf_counter() - start)
                await asyncio.sleep(max(wait, 0))
                value = values[i % len(values)]
                tasks.create_task(client.ask(kind, model, value, reply, start))
    return replies
