"""GET /, /docs and /openapi.json describe exactly the paths that are answered."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

from optimizer.harness.server.http.app import App
from optimizer.harness.server.http.request import Security
from tests.harness.server.serving import Client, on_server


def test_every_path_is_described_and_every_described_path_is_answered() -> None:
    app = App(Security(), lambda **_: None)
    answered = set(app._paths()) - {"/v1/{rest:path}"}

    async def test() -> None:
        client = Client(app, [])
        described = (await client.ask("GET", "/openapi.json")).json["paths"]
        assert set(described) == answered
        for path, operations in described.items():
            (method,) = operations
            reply = await client.ask(method.upper(), path)
            assert reply.status not in (404, 405), path
            names = [p["name"] for p in operations[method]["parameters"]]
            assert names == re.findall(r"{(\w+)}", path)

    asyncio.run(test())


def test_examples_of_the_description_are_answered(made: Path, decoder_bundle: Path) -> None:
    async def test(client: Client) -> None:
        name, generates = (
            client.app.first_service().name,
            client.app.first_service().engine.model.task.generates,
        )
        described = (await client.ask("GET", "/openapi.json")).json["paths"]
        paths = ("chat/completions", "completions") if generates else ("embeddings",)
        for path in (*(f"/v1/{p}" for p in paths), "/v2/models/{name}/infer"):
            content = described[path]["post"]["requestBody"]["content"]
            body = {**content["application/json"]["example"]}
            body |= {"model": name} if "model" in body else {}
            body |= {"max_tokens": 4} if "max_tokens" in body else {}
            reply = await client.ask("POST", path.replace("{name}", name), body)
            assert reply.status == 200, (path, reply.body)

    for bundle in (made, decoder_bundle):
        on_server(bundle, test)


def test_the_page_loads_nothing_and_needs_no_token(made: Path) -> None:
    async def test(client: Client) -> None:
        reply = await client.ask("GET", "/docs")
        page = reply.body.decode()
        assert reply.headers["content-type"].startswith("text/html")
        assert "POST /v1/embeddings" in page
        assert not re.search(r"https?://|<script|src=|@import|url\(", page)
        assert "tiny" not in page
        assert (await client.ask("GET", "/")).status == 401
        root = (await client.ask("GET", "/", headers={"Authorization": "Bearer sesame"})).json
        assert root["models"] == ["tiny", "tiny-tensors"]
        assert root["paths"]["GET /docs"]

    on_server(made, test, security=Security(token="sesame"))
