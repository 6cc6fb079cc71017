"""A bundle as an ASGI application: its life on a server of others."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.commands.application import Application
from optimizer.harness.errors import InputError
from tests.harness.server.serving import Client


def lived(application: Application, test: Callable[[Client], Awaitable[None]]) -> list[str]:
    """Run a test between startup and shutdown; what the application said of them."""

    async def run() -> list[str]:
        events, said = asyncio.Queue[Any](), asyncio.Queue[Any]()
        life = asyncio.create_task(application({"type": "lifespan"}, events.get, said.put))
        await events.put({"type": "lifespan.startup"})
        started = await asyncio.wait_for(said.get(), 30)
        if started["type"].endswith("failed"):
            await life
            return [started["type"], started["message"]]
        await test(Client(application, []))  # type: ignore[arg-type]
        await events.put({"type": "lifespan.shutdown"})
        await asyncio.wait_for(life, 30)
        return [started["type"], (await said.get())["type"]]

    return asyncio.run(run())


def test_it_answers_as_predict_does_between_startup_and_shutdown(made: Path) -> None:
    application = Application(made, ["--rows", "4"])

    async def test(client: Client) -> None:
        reply = await client.infer(["good"])
        answer = json.loads(reply.json["outputs"][0]["data"][0])
        with Bundle(made) as bundle:
            assert answer["embedding"] == bundle.predict(["good"])[0]["embedding"]
        application.check_health()

    with pytest.raises(RuntimeError, match="not ready"):
        application.check_health()
    assert lived(application, test) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    with pytest.raises(RuntimeError, match="not ready"):
        application.check_health()


def test_a_request_in_flight_is_answered_before_it_ends(decoder_bundle: Path) -> None:
    replies = list[asyncio.Task[Any]]()

    async def test(client: Client) -> None:
        asked = client.complete("good", max_tokens=60, ignore_eos=True)
        replies.append(asyncio.create_task(asked))
        while not replies[0].done():  # until it runs; a request that is still read is refused
            await asyncio.sleep(0.001)
            metrics = (await client.ask("GET", "/metrics")).body.decode()
            if re.search(r"^vllm:num_requests_running.* 1$", metrics, re.MULTILINE):
                break

    lived(Application(decoder_bundle), test)
    assert replies[0].result().status == 200


def test_a_bundle_that_cannot_be_opened_fails_the_startup(bundle: Path) -> None:
    (bundle / "manifest.json").write_text("{}")

    async def test(client: Client) -> None:
        raise AssertionError

    kind, message = lived(Application(bundle), test)
    assert kind == "lifespan.startup.failed"
    assert "manifest" in message


def test_options_that_serve_has_not_are_refused(made: Path) -> None:
    with pytest.raises(InputError):
        Application(made, ["--rowz", "4"])
