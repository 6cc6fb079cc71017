"""Send load-test requests over HTTP, to the first path that the server answers."""

from __future__ import annotations

import json
import time
from types import TracebackType
from typing import Any

import aiohttp

from optimizer.foundation.errors import InputError, MachineError
from optimizer.load_test.open_loop import Metadata, Reply
from optimizer.load_test.requests import BY_FILE, BY_TEXT, RequestKind

CONNECTIONS = 4096


class HttpClient:
    """Client of a load test that sends its requests over HTTP.

    token: bearer token, or ""
    new_tokens: maximum new tokens of a generation request
    patience: request timeout in seconds
    """

    def __init__(self, url: str, token: str, new_tokens: int, patience: float) -> None:
        self.url, self.new_tokens = url.rstrip("/"), new_tokens
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._timeout = aiohttp.ClientTimeout(total=patience)

    async def __aenter__(self) -> HttpClient:
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
        """Ask the server under test for its first model, the name of /v1/models. Raises
        MachineError where nothing answers, InputError where the answer is not a list of models."""
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

    async def inputs(self, model: str) -> list[Metadata]:
        """Ask the server under test for the model's inputs by the Open Inference Protocol; [] from
        other servers."""
        try:
            async with self._session.get(f"{self.url}/v2/models/{model}") as answer:
                return list((await answer.json(content_type=None))["inputs"])
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, LookupError, TypeError):
            return []

    async def kind(self, model: str, column: str, value: str) -> RequestKind:
        """Return the first kind of request that the server under test answers with status 200.
        Raises InputError if none does."""
        reasons = []
        for kind in BY_FILE if column == BY_FILE[0].column else BY_TEXT:
            outcome = await self.ask(kind, model, value, Reply(0.0), time.perf_counter())
            if outcome.status == 200:
                return kind
            reasons.append(f"{kind.path(model)}: {outcome.status or outcome.lost}")
        raise InputError(
            "; ".join(reasons),
            where=self.url,
            accepted="a server that answers one of these paths with 200",
        )

    async def ask(
        self, kind: RequestKind, model: str, value: str, outcome: Reply, start: float
    ) -> Reply:
        clock, parts = time.perf_counter, list[str]()
        outcome.sent = clock() - start
        body = kind.body(model, value, self.new_tokens)
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
    """Yield the JSON documents of a tested server's answer in server-sent events until [DONE].
    Raises ValueError for a document with "error", and for a stream that ends without [DONE]."""
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
