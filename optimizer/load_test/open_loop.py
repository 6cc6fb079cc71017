"""Send requests when they are due, and note what became of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

from optimizer.foundation.errors import InputError
from optimizer.harness.process.collection import no_collection
from optimizer.load_test.requests import Kind

REFUSED = (429, 503)  # of HTTP; a gRPC call that is refused for load has 503 too


@dataclass
class Outcome:
    """One request. All in seconds from the start of the run: when it was due, sent, when each piece
    of the answer came (of one that is not streamed: the whole), and when it ended. status 0: no
    answer came, and `lost` says why."""

    due: float
    sent: float = 0.0
    pieces: list[float] = field(default_factory=list)
    ended: float = 0.0
    status: int = 0
    answer: str = ""
    lost: str = ""


Metadata = Mapping[str, Any]  # of one input of a model: name, datatype, shape


class Client(Protocol):
    """Asks one server. Use as an async context manager."""

    url: str

    async def __aenter__(self) -> Client: ...
    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None: ...

    async def model(self) -> str:
        """The name of the model that is asked. Raises MachineError where nothing answers, and
        InputError where something else does."""

    async def inputs(self, model: str) -> Sequence[Metadata]:
        """Of a model, as the Open Inference Protocol has them; empty where the server does not say
        them."""

    async def kind(self, model: str, column: str, value: str) -> Kind:
        """How inputs of this column are asked, tried with one. Raises InputError where the server
        does not answer it."""

    async def ask(
        self, kind: Kind, model: str, value: str, outcome: Outcome, start: float
    ) -> Outcome:
        """Send one request now, and fill in its outcome, which is returned. start: of the run, by
        time.perf_counter."""


async def alone(client: Client, kind: Kind, model: str, values: Sequence[str]) -> dict[str, str]:
    """{input: its answer}, asked one after another. Raises InputError where one has none."""
    expected = {}
    for value in values:
        outcome = await client.ask(kind, model, value, Outcome(0.0), time.perf_counter())
        if outcome.status != 200 or outcome.lost:
            raise InputError(
                f"status {outcome.status} {outcome.lost}".strip(),
                where=f"the {kind.column} {value[:40]!r}, asked alone",
                fix=f"Give {kind.column}s that the model answers.",
            )
        expected[value] = outcome.answer
    return expected


async def run(
    client: Client, kind: Kind, model: str, values: Sequence[str], due: Sequence[float]
) -> list[Outcome]:
    """The inputs in turn, each sent when it is due, whatever became of those before."""
    outcomes = [Outcome(instant) for instant in due]
    with no_collection():
        start = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for i, outcome in enumerate(outcomes):
                wait = outcome.due - (time.perf_counter() - start)
                await asyncio.sleep(max(wait, 0))
                value = values[i % len(values)]
                tasks.create_task(client.ask(kind, model, value, outcome, start))
    return outcomes
