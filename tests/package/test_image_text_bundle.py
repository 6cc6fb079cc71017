"""One bundle embeds images and texts by both quantized sides of a pair, judged as they ship."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.bundle.manifest import MEASURED, TEXTS, read_manifest
from optimizer.harness.errors import BundleError
from optimizer.harness.server.embedded import Embedded, EmbeddedRequest
from tests.harness.server.serving import Client, on_server
from tests.package.bundles import pair_bundle
from tests.package.bundles.pair_bundle import vectors
from tests.vision import picture

PICTURE = picture(40, 40, seed=0)
TEXT = "a good film"


@pytest.fixture(scope="module", params=["siglip"])
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pair") / request.param
    return shutil.copytree(pair_bundle.make(root, request.param), root / "bundle")


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[dict[str, str]]:
    lines = (folder.parent / "evaluate.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def recall(images: Any, texts: Any, best: int) -> float:
    scores = np.array(images) @ np.array(texts).T
    own = np.diag(scores)
    to_text = (scores >= own[:, None]).sum(1) <= best
    to_image = (scores >= own[None]).sum(0) <= best
    return float((to_text + to_image.astype(float)).mean() / 2)


def test_recall_is_judged_with_both_sides_as_they_ship(
    folder: Path, rows: list[dict[str, str]]
) -> None:
    (report,) = json.loads((folder / "report.json").read_text())
    captions = [row["caption"] for row in rows]
    paths = [folder.parent / row["image"] for row in rows]
    shown = [picture(40, 40, seed=i) for i in range(len(rows))]
    texts, images = vectors(folder.parent / "pair", folder.parent.name, captions, shown)
    with Bundle(folder) as bundle:
        answers = [one["embedding"] for one in bundle.predict([*paths, *captions])]
    quality = report["quality"]
    assert quality["metric"] == "recall_at_5"
    assert quality["baseline"]["value"] == pytest.approx(recall(images, texts, 5))
    ours = answers[: len(paths)], answers[len(paths) :]
    assert quality["candidate"]["value"] == pytest.approx(recall(*ours, 5))
    for actual, right in zip(ours, (images, texts), strict=True):
        assert 0.8 < (np.array(actual) * right).sum(1).mean() < 1 - 1e-6


def test_the_side_of_texts_is_a_bundle_of_its_own_whose_damage_is_found(
    folder: Path, tmp_path: Path
) -> None:
    with Bundle(folder / TEXTS) as alone, Bundle(folder) as both:
        assert alone.task.name == "sentence-embedding"
        assert alone.predict([TEXT]) == both.predict([TEXT])
        assert alone.engine["runtime"] == "onnxruntime"
    (report,) = json.loads((folder / TEXTS / "report.json").read_text())
    assert report["verdict"] == "pass"
    assert report["ledger"]
    files = read_manifest(folder)["files"]
    assert {n for n, e in files.items() if e["measured"]} == {
        n for n in files if n.startswith(MEASURED)
    }
    copy = shutil.copytree(folder, tmp_path / "copy")
    (model,) = (copy / TEXTS / "model").rglob("*.onnx")
    model.write_bytes(model.read_bytes()[:-1])
    with pytest.raises(BundleError, match="damaged or missing: texts/"):
        Bundle(copy)


def test_the_command_line_and_another_server_take_either_kind(folder: Path) -> None:
    file = folder.parent / "0.png"
    with Bundle(folder) as bundle:
        image, text = (one["embedding"] for one in bundle.predict([file, TEXT]))
    words = [sys.executable, "-m", "harness", "predict", str(file), "--text", TEXT, "--json"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["embedding"] for one in answers] == [image, text]
    assert ["tokens" in one for one in answers] == [False, True]
    given = {"image": file.read_bytes(), "text": TEXT.encode()}
    requests = [
        EmbeddedRequest({name: np.array([one], object)}, ["embedding"])
        for name, one in given.items()
    ]
    with Embedded(folder, rows=2) as inside:
        replies = inside.answer(requests)
    assert [one["embedding"].tolist() for one in replies] == [[image], [text]]  # type: ignore[index]


def test_a_server_embeds_every_form_of_text_and_image_as_predict_does(folder: Path) -> None:
    file = (folder.parent / "0.png").read_bytes()
    in_base64 = base64.b64encode(file).decode()
    url = f"data:image/png;base64,{in_base64}"
    with Bundle(folder) as bundle:
        image, text = (one["embedding"] for one in bundle.predict([file, TEXT]))
    inputs = [TEXT, url, {"text": TEXT}, {"image": in_base64}, {"image": url}]
    inputs += [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": TEXT}]
    refused = {
        "is an address": {"image": "https://host/a.png"},
        "is not base64": {"image": "a photo"},
        "its format is not supported": {"image": base64.b64encode(b"no image").decode()},
        "without an image in base64": {"image": "data:text/plain;base64,YQ=="},
        "without a text or an image": {"video": "x"},
        "has token ids": [1, 2],
    }

    async def test(client: Client) -> None:
        async def embed(given: Any) -> Any:
            return await client.ask("POST", "/v1/embeddings", {"model": "tiny", "input": given})

        reply = (await embed(inputs)).json
        expected = [text, image, text, image, image, image, text]
        assert [one["embedding"] for one in reply["data"]] == expected
        for why, one in refused.items():
            refusal = await embed([one])
            assert refusal.status == 400
            assert why in refusal.json["error"]["message"]
        for name, sent, right in (("text", TEXT, text), ("image", in_base64, image)):
            tensor = {"name": name, "datatype": "BYTES", "shape": [1], "data": [sent]}
            infer = await client.ask("POST", "/v2/models/tiny/infer", {"inputs": [tensor]})
            assert infer.json["outputs"][0]["data"] == right
        for name, sent, right in (("texts", TEXT, text), ("images", url, image)):
            body = {"model": "tiny", name: [sent], "embedding_types": ["float"]}
            cohere = await client.ask("POST", "/v2/embed", body)
            assert cohere.json["embeddings"]["float"] == [right]
        both = {"model": "tiny", "texts": [TEXT], "images": [url]}
        assert (await client.ask("POST", "/v2/embed", both)).status == 400

    on_server(folder, test, "--max-wait", "600", "--timeout", "600")
