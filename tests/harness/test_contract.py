"""The contract says exactly what a model takes, and refuses what cannot be meant."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.errors import BundleError
from optimizer.harness.inputs.text import load_tokenizer
from tests.harness import small_model

TASKS = tasks.list_names()


@pytest.mark.parametrize("task", TASKS)
def test_a_contract_survives_writing_and_reading(task: str, tmp_path: Path) -> None:
    made = Contract.from_json(small_model.contract(task))
    (tmp_path / "contract.json").write_text(json.dumps(made.to_json()))
    assert contracts.read(tmp_path / "contract.json") == made


def test_a_contract_of_version_1_takes_texts_and_is_written_as_version_3() -> None:
    old = small_model.contract()
    assert old["version"] == 1
    new = Contract.from_json(old).to_json()
    assert new == {**json.loads(json.dumps(old)), "version": 3, "input_kind": "text", "image": None}


def without(key: str) -> dict[str, Any]:
    document = small_model.contract()
    del document[key]
    return document


INPUT = {"name": "input_ids", "dtype": "int64", "axes": ["batch", "sequence"]}
BAD = {
    "another version": small_model.contract(version=4),
    "an unknown task": small_model.contract(task="translation"),
    "an unknown key": small_model.contract(colour="red"),
    "no task": without("task"),
    "no mask": small_model.contract(inputs=[INPUT]),
    "an input no tokenizer makes": small_model.contract(
        inputs=[*small_model.contract()["inputs"], {**INPUT, "name": "position_ids"}]
    ),
    "an input twice": small_model.contract(inputs=[INPUT, *small_model.contract()["inputs"]]),
    "the output of another task": small_model.contract(
        outputs=small_model.contract("text-classification")["outputs"]
    ),
    "no pooling for an embedding": small_model.contract(pooling=None),
    "pooling for a classifier": small_model.contract("text-classification", pooling="mean"),
    "labels for an embedding": small_model.contract(labels=["a"]),
    "no labels for a classifier": small_model.contract("text-classification", labels=None),
    "two labels for a ranker": small_model.contract(
        "text-ranking", labels=["a", "b"], activation=None
    ),
    "no activation for a ranker": small_model.contract("text-ranking", activation=None),
    "an activation without labels": small_model.contract(activation="sigmoid"),
    "thresholds of a single choice": small_model.contract(
        "text-classification", thresholds=[0.5, 0.5, 0.5]
    ),
    "a threshold above 1": small_model.contract(
        "text-classification", activation="sigmoid", thresholds=[0.5, 0.5, 1.5]
    ),
    "another activation": small_model.contract("text-ranking", activation="tanh"),
    "another kind of input": small_model.contract(version=2, input_kind="image"),
    "an image processor for texts": small_model.contract(
        image=small_model.contract("image-classification")["image"]
    ),
    "no tokenizer for texts": small_model.contract(tokenizer=None),
    "an unknown dtype": small_model.contract(inputs=[{**INPUT, "dtype": "string"}]),
    "a tokenizer outside the folder": small_model.contract(
        tokenizer={**small_model.contract()["tokenizer"], "file": "../tokenizer.json"}
    ),
    "not a mapping": [],
}


@pytest.mark.parametrize("document", BAD.values(), ids=BAD.keys())
def test_what_cannot_be_meant_is_refused_with_the_file(document: Any) -> None:
    with pytest.raises(BundleError, match=r"somewhere\.json"):
        tasks.check(Contract.from_json(document, "somewhere.json"), "somewhere.json")


def test_padding_and_truncation_of_the_tokenizer_file_are_dropped(tmp_path: Path) -> None:
    _, tokenizer = small_model.opened(tmp_path)
    assert tokenizer.padding is None
    assert len(tokenizer.encode("good " * 200).ids) == 202


def test_a_padding_token_of_another_model_is_refused(tmp_path: Path) -> None:
    spec = {**small_model.contract()["tokenizer"], "pad_id": 1}
    with pytest.raises(BundleError, match="does not belong to this model"):
        small_model.opened(tmp_path, tokenizer=spec)


@pytest.mark.parametrize("content", [None, "{"])
def test_a_missing_or_broken_tokenizer_names_its_path(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(BundleError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path, Contract.from_json(small_model.contract()))


def npy(values: np.ndarray[Any, Any], shape: tuple[int, ...] | None = None) -> bytes:
    """An .npy file of values, whose header names another shape."""
    file = io.BytesIO()
    header = {"descr": values.dtype.str, "fortran_order": False, "shape": shape or values.shape}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue() + values.tobytes()


RIGHT = np.ones(2 * small_model.WIDTH, np.float32)
LAYERS = {
    "right": (npy(RIGHT), ""),
    "a shape beyond memory": (npy(RIGHT, (1 << 45,)), "cannot be read"),
    "cut": (npy(RIGHT)[:-4], "cannot be read"),
    "empty": (b"", "cannot be read"),
    "a pickle": (npy(RIGHT).replace(b"<f4", b"|O "), "cannot be read"),
    "float64": (npy(RIGHT.astype(float)), "it holds float64"),
    "fewer": (npy(RIGHT[1:]), "of shape"),
    "NaN": (npy(RIGHT * np.nan), "NaN or infinity"),
}


@pytest.mark.parametrize(("content", "problem"), LAYERS.values(), ids=list(LAYERS))
def test_a_file_of_layers_that_does_not_fit_is_refused(
    content: bytes, problem: str, tmp_path: Path
) -> None:
    layer = {"kind": "layer_norm", "inputs": small_model.WIDTH}
    embedding = {"layers": [layer], "file": "layers.npy"}
    made = Contract.from_json(small_model.contract(embedding=embedding))
    (tmp_path / "layers.npy").write_bytes(content)
    if not problem:
        np.testing.assert_array_equal(made.open_layers(tmp_path).layer_weights, RIGHT)
        return
    with pytest.raises(BundleError, match=problem):
        made.open_layers(tmp_path)
