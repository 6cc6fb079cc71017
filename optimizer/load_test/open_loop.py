"""Send requests when they are due, and note what became of each."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import aiohttp

from optimizer.errors import InputError, MachineError
from optimizer.load_test.requests import KINDS, Kind

REFUSED = (429, 503)
CONNECTIONS = 4096


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


class Client:
    """A client of one model of a server. tokens: of an answer that continues a text.

    Use as an async context manager."""

    def __init__(self, url: str, token: str, tokens: int, patience: float) -> None:
        self.url, self.tokens = url.rstrip("/"), tokens
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout = aiohttp.ClientTimeout(total=patience)

    async def __aenter__(self) -> Client:
        connections = aiohttp.TCPConnector(limit=CONNECTIONS)
        self._session = aiohttp.ClientSession(
            connector=connections, timeout=self._timeout, headers=self._headers
        )
        return self

    async def __aexit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        await self._session.close()

    async def model(self) -> str:
        """The name of the first model of /v1/models. Raises MachineError where nothing answers, and
        InputError where something else does."""
        where = f"{self.url}/v1/models"
        try:
            async with self._session.get(where) as answer:
                status, text = answer.status, await answer.text()
        except (aiohttp.ClientError, OSError, TimeoutError) as e:
            raise MachineError(
                f"no answer ({type(e).__name__}: {e})", where=where, fix="Is the server running?"
            ) from None
        try:
            return str(json.loads(text)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise InputError(
                f"status {status} and {text[:80]!r}",
                where=where,
                accepted="a list of models, as `optimize serve` answers",
                fix="Give the URL without a path, and --token-file where it wants a token.",
            ) from None

    async def kind(self, model: str, text: str) -> Kind:
        """The first kind of request that the server answers. Raises InputError for none."""
        reasons = []
        for kind in KINDS.values():
            outcome = await self.ask(kind, model, text, Outcome(0.0), time.perf_counter())
            if outcome.status == 200:
                return kind
            reasons.append(f"{kind.path(model)}: {outcome.status or outcome.lost}")
        raise InputError(
            "; ".join(reasons),
            where=self.url,
            accepted="a server that answers one of these paths with 200",
        )

    async def ask(self, kind: Kind, model: str, text: str, outcome: Outcome, start: float) -> Any:
        """Send one request now, and fill in its outcome, which is returned."""
        clock, parts = time.perf_counter, list[str]()
        outcome.sent = clock() - start
        body = kind.body(model, text, self.tokens)
        try:
            async with self._session.post(self.url + kind.path(model), json=body) as answer:
                if kind.streamed and answer.status == 200:
                    async for piece in _events(answer.content):
                        outcome.pieces.append(clock() - start)
                        parts.append(kind.answer(piece))
                else:
                    content = await answer.read()
                    outcome.pieces.append(clock() - start)
                    if answer.status == 200:
                        parts.append(kind.answer(json.loads(content)))
                outcome.status = answer.status
        except TimeoutError:
            outcome.lost = "no answer in time"
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as e:
            outcome.lost = type(e).__name__
        outcome.ended, outcome.answer = clock() - start, "".join(parts)
        return outcome


async def _events(content: aiohttp.StreamReader) -> Any:
    """The documents of server-sent events, until [DONE]. Raises ValueError where the stream ends
    before it: the answer is not whole."""
    async for line in content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        document = json.loads(data)
        if "error" in document:
            raise ValueError("an error in the middle of the answer")
        yield document
    raise ValueError("the stream ended without [DONE]")


async def alone(client: Client, kind: Kind, model: str, texts: Sequence[str]) -> dict[str, str]:
    """{text: its answer}, asked one after another. Raises InputError where one has none."""
    expected = {}
    for text in texts:
        outcome = await client.ask(kind, model, text, Outcome(0.0), time.perf_counter())
        if outcome.status != 200 or outcome.lost:
            raise InputError(
                f"status {outcome.status} {outcome.lost}".strip(),
                where=f"the text {text[:40]!r}, asked alone",
                fix="Give texts that the model answers.",
            )
        expected[text] = outcome.answer
    return expected


async def run(
    client: Client, kind: Kind, model: str, texts: Sequence[str], due: Sequence[float]
) -> list[Outcome]:
    """The texts in turn, each sent when it is due, whatever became of those before."""
    outcomes = [Outcome(instant) for instant in due]
    start = time.perf_counter()
    async with asyncio.TaskGroup() as tasks:
        for i, outcome in enumerate(outcomes):
            wait = outcome.due - (time.perf_counter() - start)
            await asyncio.sleep(max(wait, 0))
            text = texts[i % len(texts)]
            tasks.create_task(client.ask(kind, model, text, outcome, start))
    return outcomes
