"""Images over the protocols: the answers of predict, and never a file of the server's."""

import asyncio
import base64
import json
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from optimizer.harness.bundle.bundle import Bundle
from tests.harness.commands.test_ask import asked
from tests.harness.server.serving import Client, Reply, on_server
from tests.package.bundles import image_bundle
from tests.vision import encoded, picture

INFER = "/v2/models/tiny/infer"
FILES = [
    encoded(picture(20 + 9 * i, 50, seed=i), form) for i, form in enumerate(("JPEG", "PNG", "BMP"))
]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_bundle.make(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def predicted(images: Path) -> list[dict[str, Any]]:
    with Bundle(images) as bundle:
        return [{**bundle.predict([f])[0], "engine": "onnxruntime-cpu"} for f in FILES]


async def infer(client: Client, data: Sequence[Any], name: str = "image") -> Reply:
    tensor = {"name": name, "datatype": "BYTES", "shape": [len(data)], "data": list(data)}
    return await client.ask("POST", INFER, {"inputs": [tensor], "outputs": [{"name": "answer"}]})


def answers(reply: Reply) -> list[Any]:
    return [json.loads(a) for a in reply.json["outputs"][0]["data"]]


def test_answers_are_those_of_predict_however_the_files_come(
    images: Path, predicted: list[dict[str, Any]]
) -> None:
    assert len({json.dumps(p) for p in predicted}) == len(FILES)
    raw = b"".join(struct.pack("<I", len(f)) + f for f in FILES)
    tensor = {"name": "image", "datatype": "BYTES", "shape": [len(FILES)]}
    tensor["parameters"] = {"binary_data_size": len(raw)}
    head = json.dumps({"inputs": [tensor], "outputs": [{"name": "answer"}]}).encode()
    length = {"inference-header-content-length": str(len(head))}

    async def test(client: Client) -> None:
        texts = [base64.b64encode(f).decode() for f in FILES]
        apart = await asyncio.gather(*(infer(client, [t]) for t in texts * 8))
        assert [answers(r)[0] for r in apart] == predicted * 8
        assert answers(await infer(client, texts)) == predicted
        assert answers(await client.ask("POST", INFER, head + raw, length)) == predicted
        (described,) = (await client.ask("GET", "/v2/models/tiny")).json["inputs"]
        assert described == {"name": "image", "datatype": "BYTES", "shape": [-1, 1]}

    on_server(images, test, "--max-wait", "600", "--timeout", "600")


def bomb() -> bytes:
    """A PNG of 20,000 x 20,000 pixels in a few hundred bytes."""
    head = struct.pack(">IIBBBBB", 20_000, 20_000, 8, 0, 0, 0, 0)
    parts = ((b"IHDR", head), (b"IDAT", zlib.compress(b"\0" * 20_001)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize(
    ("element", "why"),
    [
        ("PATH", "is not base64"),
        (base64.b64encode(b"no image").decode(), "its format is not supported"),
        (base64.b64encode(FILES[0][:200]).decode(), "damaged or truncated"),
        (base64.b64encode(bomb()).decode(), "pixels; up to"),
        ("", "its format is not supported"),
    ],
)
def test_what_is_no_image_is_refused_in_words_and_no_file_is_read(
    images: Path, tmp_path: Path, element: str, why: str
) -> None:
    path = tmp_path / "own"  # all letters of base64, so that only the kind keeps it from being read
    path.write_bytes(FILES[1])

    async def test(client: Client) -> None:
        reply = await infer(client, [str(path) + ".png" if element == "PATH" else element])
        assert reply.status == 400
        assert why in reply.json["error"]
        inside = base64.b64encode(str(path).encode()).decode()
        assert (await infer(client, [inside])).status == 400
        assert (await infer(client, ["x"], "text")).status == 400
        embedded = {"model": "tiny", "input": str(path)}
        assert (await client.ask("POST", "/v1/embeddings", embedded)).status == 404

    on_server(images, test)


def test_a_server_asks_itself_for_a_file_of_the_command_line(
    images: Path, tmp_path: Path, predicted: list[dict[str, Any]]
) -> None:
    (tmp_path / "photo.jpg").write_bytes(FILES[0])
    done = asked(images, str(tmp_path / "photo.jpg"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[0])["label"] == predicted[0]["label"]
