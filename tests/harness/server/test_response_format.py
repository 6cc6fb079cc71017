"""Texts that follow a JSON schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optimizer.harness.errors import MachineError
from optimizer.harness.server import text_model
from tests.harness.server.serving import Client, on_server

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 22]}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


def test_texts_follow_their_schema_however_they_are_drawn(decoder_bundle: Path) -> None:
    pytest.importorskip("llguidance")

    async def test(client: Client) -> None:
        options = {"response_format": form(SCHEMA), "max_tokens": 60, "n": 6}
        for more in ({"temperature": 0}, {"temperature": 2, "seed": 1}):
            reply = await client.chat("hi", **options, **more)
            for choice in reply.json["choices"]:
                value = json.loads(choice["message"]["content"])
                assert isinstance(value["ok"], bool)
                assert value["n"] in (1, 22)
                assert set(value) == {"ok", "n"}
                assert choice["finish_reason"] == "stop"

    on_server(decoder_bundle, test)


def test_any_object_is_asked_for_without_a_schema(decoder_bundle: Path) -> None:
    pytest.importorskip("llguidance")

    async def test(client: Client) -> None:
        wish = {"type": "json_object"}
        reply = await client.chat("hi", response_format=wish, max_tokens=20, temperature=0)
        assert reply.json["choices"][0]["message"]["content"].startswith("{")

    on_server(decoder_bundle, test)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "confidential"},
        3,
        {"enum": ["x" * 70_000]},
        {"$ref": "#/nowhere"},
        {"$ref": "#"},
        {"anyOf": [{"$ref": "#"}]},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
    ],
)
def test_what_is_no_schema_is_refused_and_not_repeated(decoder_bundle: Path, schema: Any) -> None:
    pytest.importorskip("llguidance")

    async def test(client: Client) -> None:
        reply = await client.chat("hi", response_format=form(schema))
        assert reply.status == 400
        error = reply.json["error"]
        assert error["param"] == "response_format"
        assert "confidential" not in error["message"]

    on_server(decoder_bundle, test)


def test_without_the_package_it_is_refused_in_a_sentence(
    decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: Any) -> None:
        raise MachineError("llguidance is not installed", fix="")

    monkeypatch.setattr(text_model, "Grammars", missing)

    async def test(client: Client) -> None:
        reply = await client.chat("hi", response_format=form(SCHEMA))
        assert (reply.status, reply.json["error"]["message"]) == (400, text_model.NO_GRAMMARS)
        assert (await client.chat("hi", max_tokens=2)).status == 200

    on_server(decoder_bundle, test)
