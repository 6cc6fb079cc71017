"""/v1/embeddings and predict give vectors in the forms that the bundle has."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.commands.command_line import main
from optimizer.harness.tasks.embeddings.quantized_embedding import quantize
from tests.harness.server.http.test_embeddings import embed
from tests.harness.server.serving import Client, on_server
from tests.package.bundles.small_bundle import edited

TEXTS = ["film", "a good day"]
RANGES = np.stack([np.full(8, -0.5), np.full(8, 0.4)]).astype(np.float32)


@pytest.fixture(scope="module")
def formed(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small bundle, which offers int8 and ubinary vectors of 8 numbers."""
    copy = Path(shutil.copytree(made, tmp_path_factory.mktemp("formed") / "bundle"))
    forms = {"types": ["int8", "ubinary"], "dimensions": [8], "ranges": {"8": RANGES.tolist()}}
    embedding = {"quantized": forms}
    return edited(copy, lambda manifest: manifest["contract"].update(embedding=embedding))


@pytest.fixture(scope="module")
def short(made: Path) -> Any:
    """Vectors of the first 8 numbers, of unit length."""
    with Bundle(made) as bundle:
        whole = [a["embedding"][:8] for a in bundle.predict(TEXTS, batch_size=1)]
    first = np.array(whole, np.float32)
    return first / np.sqrt(np.square(first).sum(1, keepdims=True))


def test_a_request_chooses_a_form(formed: Path, made: Path, short: Any) -> None:
    async def test(client: Client) -> None:
        async def vectors(**fields: Any) -> list[Any]:
            reply = await embed(client, TEXTS, **fields)
            return [one["embedding"] for one in reply.json["data"]]

        integers, bits = (quantize(short, kind, RANGES) for kind in ("int8", "ubinary"))
        assert await vectors(output_dtype="int8", dimensions=8) == integers.tolist()
        assert await vectors(encoding_format="int8") == integers.tolist()
        assert await vectors(output_dtype="ubinary") == bits.tolist()
        packed = await vectors(output_dtype="int8", encoding_format="base64")
        assert [base64.b64decode(p) for p in packed] == [row.tobytes() for row in integers]
        assert len((await vectors(output_dtype="float"))[0]) == 32
        for fields, words in (
            ({"output_dtype": "uint8"}, "accepted: float32, int8, ubinary"),
            ({"output_dtype": "int8", "dimensions": 16}, "accepted: 8"),
            ({"output_dtype": ["int8"]}, "unknown output_dtype"),
            ({"encoding_format": "int4"}, "unknown encoding_format"),
        ):
            reply = await embed(client, TEXTS, **fields)
            assert (reply.status, words in reply.json["error"]["message"]) == (400, True)

    on_server(formed, test)


def test_predict_takes_a_type_and_dimensions(
    formed: Path, short: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["predict", "--bundle", str(formed), "--json", "--batch-size", "1"]
    assert main([*command, "--embedding-type", "int8", "--dimensions", "8", *TEXTS]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["embedding"] for line in lines] == quantize(short, "int8", RANGES).tolist()
    assert main([*command, "--embedding-type", "binary", *TEXTS]) == 2
    assert json.loads(capsys.readouterr().out)["accepted"] == "float32, int8, ubinary"


def test_cohere_gets_several_types_of_one_request(formed: Path, short: Any) -> None:
    async def test(client: Client) -> None:
        body = {"model": "tiny", "texts": TEXTS, "input_type": "search_document"}
        types = {"embedding_types": ["float", "int8", "ubinary"], "output_dimension": 8}
        reply = await client.ask("POST", "/v2/embed", {**body, **types})
        assert set(reply.json["embeddings"]) == {"float", "int8", "ubinary"}
        for kind in ("int8", "ubinary"):
            assert reply.json["embeddings"][kind] == quantize(short, kind, RANGES).tolist()
        np.testing.assert_array_equal(np.float32(reply.json["embeddings"]["float"]), short)
        assert reply.json["texts"] == TEXTS
        for fields, status, words in (
            ({"embedding_types": ["int4"]}, 400, "embedding_types is not a list of float, int8"),
            ({"embedding_types": ["uint8"]}, 400, "accepted: float32, int8, ubinary"),
            ({"output_dimension": 33}, 400, "output_dimension is not a whole number from 1"),
            ({"texts": "film"}, 400, "texts is not a list"),
            ({"texts": ["good " * 99], "truncate": "NONE"}, 413, "tokens that the model reads"),
        ):
            reply = await client.ask("POST", "/v2/embed", {**body, **fields})
            assert (reply.status, words in str(reply.json["error"])) == (status, True)

    on_server(formed, test)
