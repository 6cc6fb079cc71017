"""A request chooses the prompt before its texts, and fewer numbers per vector."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from optimizer.harness import tasks
from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.commands.command_line import main
from optimizer.harness.contract import Contract
from optimizer.harness.embedding_settings import EmbeddingSettings
from optimizer.harness.errors import InputError
from optimizer.harness.server.caches.cache import Cache
from optimizer.harness.server.http.openai import choose_prompt
from optimizer.harness.tasks.answering import Query
from tests.harness import small_model
from tests.harness.server.http.test_embeddings import embed
from tests.harness.server.serving import Client, on_server
from tests.package.bundles.small_bundle import edited

PROMPTS = {"query": "good film ", "other": "a bad "}
TEXTS = ["film", "a good day"]


@pytest.fixture(scope="module")
def prompted(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small bundle with a default prompt."""
    copy = Path(shutil.copytree(made, tmp_path_factory.mktemp("prompted") / "bundle"))
    embedding = {"prompts": PROMPTS, "prompt": "query"}
    return edited(copy, lambda manifest: manifest["contract"].update(embedding=embedding))


@pytest.fixture(scope="module")
def expected(made: Path) -> dict[str, list[Any]]:
    """Vectors of TEXTS by prompt, from the bundle without one."""
    with Bundle(made) as bundle:
        prompts = {"": "", **PROMPTS}
        return {
            name: [a["embedding"] for a in bundle.predict([text + t for t in TEXTS], batch_size=1)]
            for name, text in prompts.items()
        }


def vectors(reply: Any) -> list[Any]:
    return [one["embedding"] for one in reply.json["data"]]


def test_a_prompt_is_chosen_by_its_name_or_by_a_word_of_other_apis(
    prompted: Path, expected: dict[str, list[Any]]
) -> None:
    async def test(client: Client) -> None:
        client.app.first_service().cache = Cache(1 << 20)
        for _ in range(2):  # the second comes from the cache
            assert vectors(await embed(client, TEXTS)) == expected["query"]
            assert vectors(await embed(client, TEXTS, prompt_name="other")) == expected["other"]
            assert vectors(await embed(client, TEXTS, prompt_name="document")) == expected[""]
            for word, name in {"search_query": "query", "passage": "", "other": "other"}.items():
                assert vectors(await embed(client, TEXTS, input_type=word)) == expected[name]
        tensor = {"name": "text", "datatype": "BYTES", "shape": [2], "data": TEXTS}
        body = {"inputs": [tensor], "parameters": {"prompt_name": "other"}}
        answer = (await client.ask("POST", "/v2/models/tiny/infer", body)).json
        assert answer["outputs"][0]["data"] == [x for v in expected["other"] for x in v]

    on_server(prompted, test)


def test_what_a_request_cannot_choose_is_refused(prompted: Path) -> None:
    async def test(client: Client) -> None:
        for fields, words in (
            ({"prompt_name": "unknown"}, "unknown prompt_name; accepted: query, document, other"),
            ({"prompt_name": 7}, "unknown prompt_name"),
            ({"prompt_name": "other", "input_type": "query"}, "both given"),
            ({"dimensions": 33}, "from 1 to the model's 32"),
            ({"dimensions": 0}, "from 1 to the model's 32"),
        ):
            reply = await embed(client, TEXTS, **fields)
            assert (reply.status, words in reply.json["error"]["message"]) == (400, True)
        ids = await embed(client, [[1, 2, 3]], tokenizer="tiny")
        assert "stands before each text" in ids.json["error"]["message"]

    on_server(prompted, test)


def test_fewer_dimensions_are_the_first_ones_at_unit_length_again(
    prompted: Path, expected: dict[str, list[Any]]
) -> None:
    async def test(client: Client) -> None:
        assert vectors(await embed(client, TEXTS, dimensions=32)) == expected["query"]
        short = np.array(vectors(await embed(client, TEXTS, dimensions=8)))
        first = np.array(expected["query"])[:, :8]
        wanted = first / np.linalg.norm(first, axis=1, keepdims=True)
        np.testing.assert_allclose(short, wanted, rtol=1e-6)

    on_server(prompted, test)


def test_predict_takes_the_name_of_a_prompt(
    prompted: Path, expected: dict[str, list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["predict", "--bundle", str(prompted), "--json", "--batch-size", "1"]
    assert main([*command, "--prompt", "other", *TEXTS]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["embedding"] for line in lines] == expected["other"]
    assert main([*command, "--prompt", "unknown", *TEXTS]) == 2
    assert "query, document, other" in capsys.readouterr().out


def test_a_model_without_prompts_has_none_to_choose() -> None:
    contract = Contract.from_json(small_model.contract("text-classification"))
    with pytest.raises(InputError, match="no prompt 'query'"):
        contract.with_prompt("query")
    assert tasks.look_up(contract).optional == ()


def test_tokens_of_the_prompt_count_to_the_length_of_a_text(prompted: Path) -> None:
    with Bundle(prompted) as bundle:
        short, long = bundle.answer([Query("1", "film"), Query("2", "film " * 100)])
        before = len(bundle.encoder.ids([PROMPTS["query"]])[0])
        assert (short.tokens, long.tokens) == (before + 3, before + 102)
        assert long.kept == bundle.max_length


@pytest.mark.parametrize("word", ["search_document", "document", "passage", "corpus"])
def test_documents_get_the_prompt_that_has_a_text(word: str) -> None:
    vectors = EmbeddingSettings(prompts={"query": "query: ", "passage": "passage: "})
    contract = SimpleNamespace(vectors=vectors)
    assert choose_prompt({"input_type": word}, contract) == {"prompt_name": "passage"}  # type: ignore[arg-type]
