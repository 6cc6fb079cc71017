"""/rerank in the forms of text-embeddings-inference, Jina and Cohere: the scores of predict."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.tasks.answering import Query
from tests.conftest import sentences
from tests.harness.server.serving import Client, Reply, on_server
from tests.package.bundles import ranking_bundle

QUERY, *DOCUMENTS = sentences(9, seed=5)


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ranking_bundle.make(tmp_path_factory.mktemp("ranker"))


@pytest.fixture(scope="module")
def predicted(ranker: Path) -> list[Any]:
    with Bundle(ranker) as bundle:
        queries = [Query(str(i), QUERY, text) for i, text in enumerate(DOCUMENTS)]
        return [one.answer for one in bundle.answer(queries, 1)]


@pytest.fixture(scope="module")
def order(predicted: list[Any]) -> list[int]:
    return sorted(range(len(predicted)), key=lambda i: -predicted[i]["score"])


async def rerank(client: Client, path: str = "/rerank", **body: Any) -> Reply:
    return await client.ask("POST", path, {"query": QUERY, **body})


def test_the_answer_is_the_sigmoid_of_the_logit(predicted: list[Any]) -> None:
    for one in predicted:
        assert one["score"] == pytest.approx(1 / (1 + math.exp(-one["logit"])), rel=1e-6)
    assert len({one["score"] for one in predicted}) == len(DOCUMENTS)


def test_text_embeddings_inference_gets_a_list_with_the_best_first(
    ranker: Path, predicted: list[Any], order: list[int]
) -> None:
    async def test(client: Client) -> None:
        plain = await rerank(client, texts=DOCUMENTS)
        assert plain.json == [{"index": i, "score": predicted[i]["score"]} for i in order]
        raw = await rerank(client, texts=DOCUMENTS, raw_scores=True, return_text=True)
        assert raw.json == [
            {"index": i, "score": predicted[i]["logit"], "text": DOCUMENTS[i]} for i in order
        ]

    on_server(ranker, test)


def test_jina_and_cohere_get_results_of_texts_and_of_objects(
    ranker: Path, predicted: list[Any], order: list[int]
) -> None:
    objects = [{"text": text, "id": i} for i, text in enumerate(DOCUMENTS)]
    best = [{"index": i, "relevance_score": predicted[i]["score"]} for i in order[:3]]

    async def test(client: Client) -> None:
        for path, version in (("/v1/rerank", "1"), ("/v2/rerank", "2"), ("/rerank", "1")):
            reply = await rerank(client, path, model="tiny", documents=DOCUMENTS, top_n=3)
            assert reply.json["results"] == best
            assert reply.json["model"] == "tiny"
            assert reply.json["meta"]["api_version"] == {"version": version}
            assert reply.json["usage"]["total_tokens"] > len(DOCUMENTS)
        reply = await rerank(client, "/v1/rerank", documents=objects, return_documents=True)
        texts = [one["document"]["text"] for one in reply.json["results"]]
        assert texts == [DOCUMENTS[i] for i in order]

    on_server(ranker, test)


def test_the_documents_of_a_query_share_batches(ranker: Path) -> None:
    async def test(client: Client) -> None:
        texts = ["a good film", "a bad film"] * 16
        metrics = client.app.first_service().engine.metrics
        assert (await rerank(client, texts=texts)).status == 200
        assert metrics.rows._values[()] == len(texts)
        assert metrics.batches._values[()] < len(texts) / 2

    on_server(ranker, test, "--rows", "8")


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({}, 400, "documents is not a list"),
        ({"texts": ["a"], "query": " "}, 400, "query is not a text"),
        ({"texts": []}, 413, "0 texts; accepted: 1 to 4"),
        ({"texts": ["a"] * 5}, 413, "5 texts; accepted: 1 to 4"),
        ({"texts": ["a", 1]}, 400, r"texts[1] is not a text"),
        ({"texts": ["a"], "documents": ["a"]}, 400, "two forms"),
        ({"documents": [{"image": "x"}]}, 400, 'an object with "text"'),
        ({"documents": ["a"], "top_n": 0}, 400, "top_n"),
        ({"documents": ["a"], "max_tokens_per_doc": 5}, 400, "cut at 32 tokens together"),
        ({"documents": ["a"], "model": "other"}, 404, "unknown model"),
        ({"texts": ["good " * 40], "truncate": False}, 413, "more than the 32 tokens"),
        ({"texts": ["a"], "raw_scores": "yes"}, 400, "raw_scores is not true or false"),
    ],
)
def test_a_wrong_request_is_refused_with_what_is_accepted(
    ranker: Path, body: dict[str, Any], status: int, message: str
) -> None:
    async def test(client: Client) -> None:
        reply = await rerank(client, **body)
        assert (reply.status, message in reply.json["error"]) == (status, True), reply.body

    on_server(ranker, test, "--max-texts", "4")


def test_a_model_of_another_task_says_what_it_does(made: Path) -> None:
    async def test(client: Client) -> None:
        reply = await rerank(client, "/v2/rerank", model="tiny", documents=DOCUMENTS)
        assert reply.status == 404
        assert "sentence-embedding" in reply.json["error"]

    on_server(made, test)
