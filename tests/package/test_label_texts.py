"""Labels that a request brings get the scores of transformers' pipeline."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from optimizer.export.stage import run as export
from optimizer.foundation.errors import GateError
from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.bundle.label_encoder import LabelEncoder
from optimizer.harness.contract import Contract
from optimizer.harness.errors import BundleError
from optimizer.harness.server import answer_size
from optimizer.harness.server.inference import ANSWER, read_inputs
from optimizer.harness.tasks.answering import Predictor, Query, answer
from optimizer.load.stage import STAGE
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model
from optimizer.package import label_texts
from optimizer.recipe.answers import ZeroShot
from optimizer.recipe.schema import Export, Model
from optimizer.store import LabelModelSteps
from tests.load.test_pairs import LABELS, PICTURES, PIXELS, ZERO_SHOT, write

REQUESTS: tuple[str | None, ...] = (
    None,
    "a phone, good food ,bad",
    '{"candidate_labels": ["the film", "x"], "hypothesis_template": "{}, good or bad."}',
)


def section(folder: Path, **options: Any) -> Model:
    chosen = ZeroShot(candidate_labels=LABELS, labels_of_requests=True, **options)
    return Model(source=str(folder), task=ZERO_SHOT, zero_shot=chosen)  # type: ignore[arg-type]


def load(model: Model | None, out: Path) -> Path:
    assert model is not None
    out.mkdir()
    STAGE.run(model, out=out)
    return out


@pytest.fixture(scope="module", params=["clip", "siglip"])
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pair, images and texts (folders of load), graph, and bundle with texts/ in it."""
    root = tmp_path_factory.mktemp(request.param)
    model = section(write(root / "pair", request.param))
    load(model, root / "images")
    load(model.side_of_texts, root / "texts")
    for name in ("graph", "bundle"):
        (root / name).mkdir()
    export(Export(), root / "texts", out=root / "graph")
    label_texts.add(
        root / "bundle", LabelModelSteps(root / "texts", root / "graph"), root / "images"
    )
    return root


@pytest.fixture(scope="module")
def predictor(folder: Path) -> Predictor:
    contract = contracts.read(folder / "images" / "contract.json")
    model = load_torch_model(open_checkpoint(folder / "images"), contract.task)

    def infer(batch: Any) -> dict[str, Any]:
        with torch.no_grad():
            outputs = model(**{n: torch.from_numpy(a) for n, a in batch.items()})
        return {spec.name: outputs[spec.name].numpy() for spec in contract.outputs}

    return Predictor(contract, LabelEncoder(folder / "bundle", (), threads=1), infer)


def ask(predictor: Predictor, *labels: str | None) -> list[Any]:
    queries = [Query("line 7", PIXELS[i % 3], one) for i, one in enumerate(labels)]
    return list(answer(predictor, queries, len(queries)))


def test_labels_of_a_request_have_the_scores_of_transformers_pipeline(
    folder: Path, predictor: Predictor
) -> None:
    from transformers import AutoImageProcessor, pipeline

    reader = AutoImageProcessor.from_pretrained(folder / "pair", backend="pil")
    judge = pipeline(ZERO_SHOT, model=str(folder / "pair"), image_processor=reader)
    options: list[dict[str, Any]] = [
        {"candidate_labels": list(LABELS)},
        {"candidate_labels": ["a phone", "good food", "bad"]},
        json.loads(str(REQUESTS[2])),
    ]
    together = ask(predictor, *REQUESTS)
    for image, labels, named, one in zip(PICTURES, REQUESTS, options, together, strict=True):
        listed = judge(image, **named)
        assert one.answer["label"] == listed[0]["label"], labels
        scores = {each["label"]: pytest.approx(each["score"], rel=1e-4) for each in listed}
        assert one.answer["scores"] == scores
        assert one.answer["score"] == max(one.answer["scores"].values())
    assert ask(predictor, REQUESTS[1])[0].answer == ask(predictor, REQUESTS[1])[0].answer


def test_labels_that_cannot_be_answered_are_refused_by_their_reason(predictor: Predictor) -> None:
    for labels, why in {
        "cat, cat": "comes twice",
        **({} if predictor.contract.activation else {"cat": "two labels or more"}),
        " , ": "none among the labels",
        '{"multi_label": true}': "is for texts",
        "cat, [SEP]": "special token",
        f"cat, {'good ' * 80}": "more than 64 tokens",
        ",".join(map(str, range(1001))): "1001 labels",
    }.items():
        (one,) = ask(predictor, labels)
        assert why in f"{one.error}", labels
    (one,) = ask(replace(predictor, encoder=None), "cat, dog")
    assert "labels_of_requests: true" in str(one.error)


def test_a_server_reads_labels_as_texts_and_predicts_the_size_of_the_answer(
    predictor: Predictor,
) -> None:
    task, contract = tasks.look_up(predictor.contract), predictor.contract
    assert task.fields(contract) == ("image", "candidate_labels")
    assert task.fields(replace(contract, label_texts=None)) == ("image",)
    arrays = {"image": np.array([b"AAAA"], object)}
    arrays["candidate_labels"] = np.array(["日, é".encode()], object)
    inputs, pairs = read_inputs(task.inputs, arrays, set(arrays), 4)
    assert (inputs, pairs) == ([b"\0\0\0"], ["日, é"])
    for labels in (None, "日, é"):
        (one,) = ask(predictor, labels)
        size = answer_size.predict_field_bytes(
            task, contract, inputs, {ANSWER: False}, None if labels is None else [labels]
        )
        assert len(json.dumps([json.dumps(one.answer)])) <= size


@pytest.mark.parametrize("setting", ["scale", "bias", "hypothesis_template"])
def test_a_bundle_that_reads_labels_otherwise_is_refused(
    folder: Path, tmp_path: Path, setting: str
) -> None:
    images = shutil.copytree(folder / "images", tmp_path / "images")
    document = json.loads((images / "contract.json").read_text())
    wrong = {"scale": 1.001, "bias": 0.001, "hypothesis_template": "This is {}."}[setting]
    section = document["label_texts"]
    section[setting] = section[setting] * wrong if setting == "scale" else wrong
    (images / "contract.json").write_text(json.dumps(document))
    with pytest.raises(GateError, match="away from transformers'"):
        label_texts.add(tmp_path, LabelModelSteps(folder / "texts", folder / "graph"), images)


def test_a_contract_without_the_vector_of_images_takes_no_labels(folder: Path) -> None:
    contract = contracts.read(folder / "images" / "contract.json")
    assert Contract.from_json(contract.to_json()) == contract
    with pytest.raises(BundleError, match="image_embeds"):
        tasks.check(replace(contract, outputs=contract.outputs[:1]))
