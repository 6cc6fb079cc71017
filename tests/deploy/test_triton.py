"""Triton repository: config.pbtxt and model.py agree with the bundle."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.server.embedded import Embedded, EmbeddedRequest
from optimizer.harness.server.refusals import RequestError
from tests.deploy import triton_repository
from tests.deploy.conftest import deployed
from tests.package.bundles import image_bundle
from tests.vision import encoded, picture

FORMS = ("JPEG", "PNG", "BMP")
TEXTS = ["good", "a good film", "bad"]
FIELDS = {  # fields of ModelConfig in Triton's model_config.proto, and of the nested messages used
    "": "name backend max_batch_size input output dynamic_batching instance_group parameters",
    "input": "name data_type dims optional",
    "output": "name data_type dims",
    "instance_group": "count kind",
    "parameters": "key value",
}
GOLDEN = """\
name: "tiny"
backend: "python"
max_batch_size: 8
input [ {
  name: "text"
  data_type: TYPE_STRING
  dims: [ 1 ]
} ]
output [ {
  name: "embedding"
  data_type: TYPE_FP32
  dims: [ 32 ]
} ]
output [ {
  name: "answer"
  data_type: TYPE_STRING
  dims: [ 1 ]
} ]
dynamic_batching { }
instance_group [ { count: 1 kind: KIND_CPU } ]
parameters { key: "bundle_version" value { string_value: "1" } }
"""


def texts(*rows: str) -> dict[str, Any]:
    return {"text": np.array([[row.encode()] for row in rows], object)}


def repository(bundle: Path, out: Path, *words: str) -> Path:
    """Write a repository and return its model folder."""
    document = deployed(bundle, "--to", "triton", "--out", out, *words)
    return out / "models" / str(document["bundle"])


def test_the_config_is_this_and_has_the_shapes_of_the_contract(
    bundle: Path, tmp_path: Path
) -> None:
    text = (repository(bundle, tmp_path / "out") / "config.pbtxt").read_text()
    head, last = text[: len(GOLDEN)], text[len(GOLDEN) :]
    assert head == GOLDEN
    assert last.count("\n") == 1
    config = triton_repository.read(text)
    for name, known in FIELDS.items():
        messages = config[name] if name else [config]
        assert all(set(m) <= set(known.split()) for m in messages)
    contract = json.loads((bundle / "manifest.json").read_text())["contract"]
    (width,) = (o["axes"][-1] for o in contract["outputs"] if o["name"] == "last_hidden_state")
    assert config["output"][0]["dims"] == [str(width)]


def test_a_batch_is_as_large_as_is_said(bundle: Path, tmp_path: Path) -> None:
    folder = repository(bundle, tmp_path / "out", "--", "--rows", "3")
    config = triton_repository.read((folder / "config.pbtxt").read_text())
    assert config["max_batch_size"] == ["3"]


def test_every_answer_is_that_of_predict_and_a_wrong_request_stops_no_other(bundle: Path) -> None:
    with Bundle(bundle) as opened:
        alone = [opened.predict([t])[0]["embedding"] for t in TEXTS]
    with Embedded(bundle, 2) as embedded:
        assert embedded.sharing == "equal"
        one, wrong, other = embedded.answer(
            [
                EmbeddedRequest(texts(*TEXTS), ["embedding", "answer"]),
                EmbeddedRequest({"text": np.array([[b"\xff"]], object)}, ["embedding"]),
                EmbeddedRequest(texts(TEXTS[2]), ["answer"]),
            ]
        )
    assert isinstance(wrong, RequestError)
    assert not isinstance(one, RequestError)
    assert not isinstance(other, RequestError)
    assert np.array_equal(one["embedding"], np.array(alone, np.float32))
    assert [json.loads(a)["embedding"] for a in one["answer"]] == alone
    assert list(other) == ["answer"]


def test_texts_are_continued_as_predict_does_with_the_options_of_their_request(
    decoder_bundle: Path,
) -> None:
    with Bundle(decoder_bundle) as opened:
        from optimizer.harness.generate import Options

        expected = [opened.generate([t], Options(max_new_tokens=4))[0].text for t in TEXTS]
    with Embedded(decoder_bundle, 8) as embedded:
        options = {"max_new_tokens": 4, "not ours": 1}
        (answer, wrong, adapted) = embedded.answer(
            [
                EmbeddedRequest(texts(*TEXTS), ["text"], options),
                EmbeddedRequest(texts("a"), ["text"], {"max_new_tokens": 0}),
                EmbeddedRequest(texts("a"), ["text"], {"adapter": "sql"}),
            ]
        )
    assert not isinstance(answer, RequestError)
    assert [t.decode() for t in answer["text"]] == expected
    assert isinstance(wrong, RequestError)
    assert isinstance(adapted, RequestError)
    assert "without adapters" in adapted.message


def test_files_of_images_are_answered_as_predict_does_with_columns_as_the_config_has_them(
    tmp_path: Path,
) -> None:
    images = image_bundle.make(tmp_path / "images")
    files = [encoded(picture(20 + 9 * i, 50, seed=i), form) for i, form in enumerate(FORMS)]
    with Bundle(images) as opened:
        expected = [opened.predict([f])[0] for f in files]
    config = triton_repository.read(
        (repository(images, tmp_path / "out") / "config.pbtxt").read_text()
    )
    (name,) = config["input"][0]["name"]
    names = [o["name"][0] for o in config["output"]]
    rows = np.array([[f] for f in files], object)
    with Embedded(images, 8) as embedded:
        (answer,) = embedded.answer([EmbeddedRequest({name: rows}, names)])
    assert not isinstance(answer, RequestError)
    for output in config["output"][:-1]:
        column = answer[output["name"][0]].reshape([len(files), *map(int, output["dims"])])
        assert column.ravel().tolist() == [
            v.encode() if isinstance(v, str) else np.float32(v)
            for row in expected
            for v in [row[output["name"][0]]]
        ]
    assert [{**e, "engine": "onnxruntime-cpu"} for e in expected] == [
        json.loads(a) for a in answer["answer"]
    ]


STUB = """
import json, sys, types
import numpy as np

class Tensor:
    def __init__(self, name, array):
        self.name, self.array = name, array
    def as_numpy(self):
        return self.array
    def to_dlpack(self):
        return self.array

class Request:
    def __init__(self, text, outputs):
        self.tensors = {"text": Tensor("text", np.array([[t.encode()] for t in text], object))}
        self.outputs = outputs
    def parameters(self):
        return ""
    def requested_output_names(self):
        return self.outputs

class TritonError(Exception):
    INTERNAL, INVALID_ARG = 1, 2
    def __init__(self, message, kind):
        self.message, self.kind = message, kind

class Response:
    def __init__(self, tensors=(), error=None):
        self.tensors, self.error = tensors, error

stub = types.ModuleType("triton_python_backend_utils")
stub.Tensor, stub.InferenceResponse, stub.TritonError = Tensor, Response, TritonError
Tensor.from_dlpack = Tensor
stub.get_input_tensor_by_name = lambda request, name: request.tensors.get(name)
stub.triton_string_to_numpy = {"TYPE_STRING": np.object_, "TYPE_FP32": np.float32}.__getitem__
stub.Logger = types.SimpleNamespace(log_info=lambda text: None)
sys.modules[stub.__name__] = stub
folder, config, texts = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
sys.path.insert(0, folder + "/1")
from model import TritonPythonModel
model = TritonPythonModel()
model.initialize(
    {"model_repository": folder, "model_version": "1", "model_config": json.dumps(config)}
)
right, wrong = model.execute(
    [Request(texts, ["embedding", "answer"]), Request([], ["embedding"])]
)
model.finalize()
assert "numpy" in sys.modules and not {"torch", "optimizer"} & set(sys.modules)
shapes = {t.name: [str(t.array.dtype), *t.array.shape] for t in right.tensors}
print(json.dumps([right.tensors[0].array.tolist(), shapes, wrong.error.kind]))
"""


@pytest.mark.parametrize("rows", [8])
def test_the_models_code_gives_tensors_of_the_config_with_nothing_of_ours_installed(
    rows: int, bundle: Path, tmp_path: Path
) -> None:
    folder = repository(bundle, tmp_path / "out")
    text = triton_repository.read((folder / "config.pbtxt").read_text())
    config = {n: text[n][0] for n in ("name", "max_batch_size")}
    for kind in ("input", "output"):
        config[kind] = [{n: v if n == "dims" else v[0] for n, v in t.items()} for t in text[kind]]
    command = [sys.executable, "-B", "-c", STUB, folder, json.dumps(config), json.dumps(TEXTS)]
    done = subprocess.run([str(c) for c in command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    embeddings, shapes, kind = json.loads(done.stdout)
    with Bundle(bundle) as opened:
        expected = [opened.predict([t])[0]["embedding"] for t in TEXTS]
    assert np.array_equal(np.array(embeddings, np.float32), np.array(expected, np.float32))
    assert shapes == {"embedding": ["float32", 3, 32], "answer": ["object", 3, 1]}
    assert kind == 2
