"""/embed_sparse in the form of text-embeddings-inference: the weights of predict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.tasks.answering import Query
from tests.conftest import sentences
from tests.harness.server.serving import Client, on_server
from tests.package.bundles import ranking_bundle

TEXTS = sentences(3, seed=5)


@pytest.fixture(scope="module")
def weigher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ranking_bundle.make(tmp_path_factory.mktemp("weigher"), "sparse-embedding")


def test_entries_of_the_vocabulary_come_with_their_weights_in_order(weigher: Path) -> None:
    with Bundle(weigher) as bundle:
        queries = [Query(str(i), text) for i, text in enumerate(TEXTS)]
        predicted: list[Any] = [one.answer for one in bundle.answer(queries, 1)]

    async def test(client: Client) -> None:
        reply = await client.ask("POST", "/embed_sparse", {"inputs": TEXTS})
        assert len(reply.json) == len(TEXTS)
        for row, one in zip(reply.json, predicted, strict=True):
            assert {e["index"]: e["value"] for e in row} == dict(
                zip(one["indices"], one["values"], strict=True)
            )
            assert [e["index"] for e in row] == sorted(one["indices"])
        (alone,) = (await client.ask("POST", "/embed_sparse", {"inputs": TEXTS[0]})).json
        assert alone == reply.json[0]

    on_server(weigher, test)


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, "inputs is not a text or a list of texts"),
        ({"inputs": ["a", 1]}, 400, "inputs is not"),
        ({"inputs": "a", "prompt_name": "other"}, 400, "accepted: query, document"),
        ({"inputs": "good " * 40, "truncate": False}, 413, "more than the 32 tokens"),
        ({"texts": ["a"]}, 400, "accepted: model, inputs"),
    ],
)
def test_a_wrong_request_is_refused_with_what_is_accepted(
    weigher: Path, body: dict[str, Any], status: int, message: str
) -> None:
    async def test(client: Client) -> None:
        reply = await client.ask("POST", "/embed_sparse", body)
        assert (reply.status, message in reply.json["error"]) == (status, True), reply.body

    on_server(weigher, test)
