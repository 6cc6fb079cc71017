"""A server of the small bundle on this process's own event loop, and requests to it."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.server import options
from optimizer.harness.server.http.app import App
from optimizer.harness.server.http.request import Security
from optimizer.harness.server.observe.tracing import Tracer
from optimizer.harness.server.versions.versions import Served
from optimizer.harness.server.warm_up import start


class Reply(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Of a stream: its events, the last a text that is no JSON where it is complete."""
        parts = self.body.decode().split("\n\n")
        assert parts.pop() == ""
        lines = [part.removeprefix("data: ") for part in parts]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


class Client:
    """Asks an ASGI application without a socket."""

    def __init__(self, app: App, lines: list[dict[str, Any]]) -> None:
        self.app, self.lines = app, lines
        self.address = "127.0.0.1"

    async def ask(
        self,
        method: str,
        path: str,
        body: bytes | Mapping[str, Any] = b"",
        headers: Mapping[str, str] | None = None,
        gone: asyncio.Event | None = None,
    ) -> Reply:
        """gone: set when the client leaves."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        parts = [{"type": "http.request", "body": data, "more_body": False}]
        sent: list[Any] = []

        async def receive() -> Any:
            if parts:
                return parts.pop()
            await (gone or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        pairs = [(k.lower().encode(), v.encode()) for k, v in (headers or {}).items()]
        scope: Any = {"type": "http", "method": method, "path": path, "headers": pairs}
        scope["client"] = (self.address, 1)
        await self.app(scope, receive, send)
        if not sent:
            return Reply(499, {}, b"")
        head = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
        return Reply(sent[0]["status"], head, b"".join(m["body"] for m in sent[1:]))

    async def chat(self, content: str, **options: Any) -> Reply:
        messages = [{"role": "user", "content": content}]
        body = {"model": "tiny-decoder", "messages": messages, **options}
        return await self.ask("POST", "/v1/chat/completions", body)

    async def complete(self, prompt: Any, **options: Any) -> Reply:
        body = {"model": "tiny-decoder", "prompt": prompt, **options}
        return await self.ask("POST", "/v1/completions", body)

    async def infer(self, texts: list[str], **parameters: Any) -> Reply:
        tensor = {"name": "text", "datatype": "BYTES", "shape": [len(texts)], "data": texts}
        outputs = [{"name": "answer"}]
        document = {"inputs": [tensor], "outputs": outputs, "parameters": parameters}
        return await self.ask("POST", "/v2/models/tiny/infer", document)


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    options.add_options(parser)
    return parser.parse_args(words)


@asynccontextmanager
async def serving(
    bundle: Path,
    *words: str,
    security: Security | None = None,
    tracer: Tracer | None = None,
) -> AsyncIterator[Client]:
    """A ready server, drained at the end."""
    lines: list[dict[str, Any]] = []

    def say(**fields: Any) -> None:
        lines.append(fields)

    app = App(security or Security(), say, tracer)
    opened = Bundle(bundle)
    service = await start.start_service(opened, parsed(*words), say)
    app.versions.add(Served(service, "", opened.close))
    try:
        yield Client(app, lines)
    finally:
        await app.versions.wait_until_drained()
        opened.close()


def on_server(
    bundle: Path, test: Callable[[Client], Awaitable[None]], *words: str, **more: Any
) -> None:
    """Run a test against a server of its own."""

    async def run() -> None:
        async with serving(bundle, *words, **more) as client:
            await test(client)

    asyncio.run(run())
