"""/v1/embeddings: token ids are those of the model, and are refused where that is not said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.server.caches.cache import Cache
from tests.harness.server.serving import Client, Reply, on_server

TEXTS = ["good", "a good film"]


@pytest.fixture(scope="module")
def ids(made: Path) -> list[list[int]]:
    """Token ids of TEXTS."""
    with Bundle(made) as bundle:
        return [bundle.predictor.encoder.encode(text).ids for text in TEXTS]


async def embed(client: Client, value: Any, **fields: Any) -> Reply:
    body = {"model": "tiny", "input": value, **fields}
    return await client.ask("POST", "/v1/embeddings", body)


def test_token_ids_of_the_model_have_the_bits_of_their_text(
    made: Path, ids: list[list[int]]
) -> None:
    async def test(client: Client) -> None:
        client.app.first_service().cache = Cache(1 << 20)
        texts = (await embed(client, TEXTS)).json
        for _ in range(2):  # the second comes from the cache
            assert (await embed(client, ids, tokenizer="tiny")).json == texts
        one = (await embed(client, ids[0], tokenizer="tiny")).json
        assert one["data"] == texts["data"][:1]

    on_server(made, test)


def test_token_ids_of_an_unnamed_tokenizer_are_refused_with_what_to_do(
    made: Path, ids: list[list[int]]
) -> None:
    async def test(client: Client) -> None:
        error = (await embed(client, ids)).json["error"]
        assert error["param"] == "input"
        assert "check_embedding_ctx_length=False" in error["message"]
        assert '"tokenizer": "tiny"' in error["message"]
        assert (await embed(client, ids, tokenizer="cl100k_base")).json["error"]["param"] == (
            "tokenizer"
        )

    on_server(made, test)


def test_token_ids_that_are_no_text_of_the_model_are_refused(
    made: Path, ids: list[list[int]]
) -> None:
    first, *_, last = ids[0]
    wrong: dict[str, list[Any]] = {
        "vocabulary": [first, 10**6, last],
        "special tokens": ids[0][1:-1],
        "accepted: 3 to 32": [first, *ids[0][1:-1] * 40, last],
        "both texts": [ids[0], "good"],
        "neither a text": [[first, True, last]],
    }

    async def test(client: Client) -> None:
        for reason, value in wrong.items():
            reply = await embed(client, value, tokenizer="tiny")
            assert (reply.status, reason in reply.json["error"]["message"]) == (400, True), reason

    on_server(made, test)


@pytest.mark.parametrize(
    "image",
    [
        "data:image/png;base64,AAAA",
        {"image": "AAAA"},
        {"image_url": {"url": "x"}, "type": "image_url"},
    ],
)
def test_a_model_of_texts_refuses_images_and_takes_texts_as_objects(made: Path, image: Any) -> None:
    async def test(client: Client) -> None:
        refused = await embed(client, ["good", image])
        assert refused.status == 400
        assert "input 1 is an image, and this model takes texts" in refused.json["error"]["message"]
        body = {"model": "tiny", "images": ["data:image/png;base64,AAAA"]}
        assert "takes texts" in (await client.ask("POST", "/v2/embed", body)).json["error"]
        texts = (await embed(client, ["good"])).json
        assert (await embed(client, [{"text": "good"}])).json == texts

    on_server(made, test)
