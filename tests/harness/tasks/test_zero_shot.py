"""Candidate labels get the scores of transformers' ZeroShotClassificationPipeline."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from optimizer.foundation.errors import CheckpointError
from optimizer.harness import tasks
from optimizer.harness.commands.queries import check_labels, parse_labels
from optimizer.harness.contract import Contract
from optimizer.harness.errors import BundleError, InputError
from optimizer.harness.server import answer_size
from optimizer.harness.server.inference import ANSWER
from optimizer.harness.tasks import zero_shot_classification
from optimizer.harness.tasks.answering import Predictor, Query, answer
from optimizer.harness.zero_shot_settings import LabelTexts
from optimizer.load.stage import STAGE
from optimizer.recipe.answers import ZeroShot
from optimizer.recipe.schema import Model
from optimizer.validate.ledger.laws import answer_fields, answer_laws
from optimizer.validate.ledger.laws.rows import claim_laws
from tests.conftest import sentences, write_tiny_bert
from tests.harness import small_model
from tests.harness.torch_predictor import torch_predictor

LABELS = ("food", "film", "waste of money")
TEMPLATE = "It was about {}, good or bad."
TEXTS = [*sentences(3, seed=3), "good " * 80]
MODELS = (("contradiction", "neutral", "entailment"), ("ENTAILMENT", "not_entailment"))


def section(folder: Path, **options: Any) -> Model:
    choice = ZeroShot(candidate_labels=LABELS, hypothesis_template=TEMPLATE, **options)
    return Model(source=str(folder), task="zero-shot-classification", zero_shot=choice)  # type: ignore[arg-type]


@pytest.fixture(scope="module", params=MODELS, ids=["three labels", "entailment first"])
def loaded(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of load of a tiny model of inference, beside its source, "model"."""
    root = tmp_path_factory.mktemp("inference")
    write_tiny_bert(root / "model", labels=request.param, seed=5)
    (root / "loaded").mkdir()
    STAGE.run(section(root / "model"), out=root / "loaded")
    return root / "loaded"


@pytest.fixture(scope="module")
def predictor(loaded: Path) -> Predictor:
    return torch_predictor(loaded)


def ask(predictor: Predictor, *queries: tuple[str, str | None]) -> list[Any]:
    return list(answer(predictor, [Query("line 7", *query) for query in queries], 4))


def test_labels_and_scores_are_the_pipelines(loaded: Path, predictor: Predictor) -> None:
    from transformers import pipeline

    folder = str(loaded.parent / "model")
    judge = pipeline("zero-shot-classification", model=folder, device="cpu")
    requests: list[tuple[str | None, dict[str, Any]]] = [
        (None, {"candidate_labels": list(LABELS), "hypothesis_template": TEMPLATE}),
        ("bad, good ,x", {"candidate_labels": "bad, good ,x", "hypothesis_template": TEMPLATE}),
        ('["one, two"]', {"candidate_labels": ["one, two"], "hypothesis_template": TEMPLATE}),
    ]
    several = {"candidate_labels": ["a", "b"], "hypothesis_template": "{}?", "multi_label": True}
    requests.append((json.dumps(several), several))
    for labels, options in requests:
        answers = ask(predictor, *((text, labels) for text in TEXTS))
        for text, one in zip(TEXTS, answers, strict=True):
            theirs = judge(text, **options)
            assert one.answer["labels"] == theirs["labels"]
            assert one.answer["scores"] == pytest.approx(theirs["scores"], rel=1e-4)
            assert one.truncated == (text is TEXTS[-1])


def test_labels_that_cannot_be_read_are_refused_by_their_reason(predictor: Predictor) -> None:
    for labels, why in {
        "[1]": "not a list of texts",
        " , ": "none among the labels",
        "{": "not JSON",
        '{"labels": ["a"]}': "another field",
        '{"hypothesis_template": "about"}': "one {}",
        '{"hypothesis_template": "{0.__class__}"}': "one {}",
        '{"multi_label": 1}': "true or false",
        "word " * 70: "leaves 0 of 64 tokens",
    }.items():
        (one,) = ask(predictor, ("good", labels))
        assert why in str(one.error), labels


def test_a_fault_in_a_choice_is_caught(loaded: Path, predictor: Predictor) -> None:
    reference = answer_laws.ReferencePipeline(predictor.contract, loaded / "checkpoint")
    width = len(predictor.contract.labels or ())
    logits = np.random.default_rng(0).normal(0, 2, (3, width)).astype(np.float32)
    (row,) = tasks.encode_each(predictor.contract, predictor.encoder, TEXTS[:1])
    order = [part.input.number for part in row.parts]
    batch = tasks.look_up(predictor.contract).inputs.collate(predictor.contract, row.parts)
    parts = tasks.build_answers(predictor.contract, logits[order], batch)
    one = zero_shot_classification.TASK.merge(predictor.contract, parts)
    target = claim_laws.expected(reference, logits)
    assert list(answer_fields.differ(one, target)) == []
    for field in ("labels", "scores"):
        assert list(answer_fields.differ({**one, field: one[field][::-1]}, target)), field


def test_calibration_reads_every_label(predictor: Predictor) -> None:
    texts = sentences(30)
    first = tasks.encode_each(predictor.contract, predictor.encoder, texts)
    assert {one.input.label for one in first} == set(LABELS)


def test_a_line_may_name_its_labels() -> None:
    lines = ('{"text": "a", "candidate_labels": ["b"]}', "plain", '{"other": 1}', '{"text": "a"}')
    for labels in (None, "c, d"):
        queries = parse_labels([Query("line", line) for line in lines], labels, "text")
        parsed = [(q.input, q.pair) for q in queries]
        assert parsed[0] == ("a", '{"candidate_labels": ["b"]}')
        assert parsed[1:] == [("plain", labels), ('{"other": 1}', labels), ("a", labels)]


def test_a_line_with_other_settings_alone_has_the_labels_of_all_texts(predictor: Predictor) -> None:
    line = '{"text": "good", "multi_label": true}'
    for labels in ("c, d", '["c", "d"]', '{"candidate_labels": "c, d", "multi_label": false}'):
        (one,) = parse_labels([Query("line", line)], labels, "text")
        (answer,) = ask(predictor, (one.input, one.pair))
        assert answer.answer is not None
        assert set(answer.answer["labels"]) == {"c", "d"}
        assert sum(answer.answer["scores"]) != pytest.approx(1)  # each label by itself


def test_labels_are_refused_for_a_model_that_chooses_none() -> None:
    def contract(task: str) -> Contract:
        return Contract.from_json(small_model.contract(task))

    check_labels("a, b", contract("zero-shot-classification"))
    with pytest.raises(InputError, match="which takes no labels"):
        check_labels("a, b", contract("text-classification"))
    images = contract("zero-shot-image-classification")
    with pytest.raises(InputError, match="those of its recipe"):
        check_labels("a, b", images)
    check_labels("a, b", replace(images, label_texts=LabelTexts("{}", 1.0, 0.0)))


def test_a_server_predicts_the_size_of_the_answer(predictor: Predictor) -> None:
    task, labels = tasks.look_up(predictor.contract), json.dumps(["日", "a" * 50, "é,😀"] * 9)
    for pair in (None, labels):
        (one,) = ask(predictor, ("good", pair))
        size = answer_size.predict_field_bytes(
            task, predictor.contract, ["good"], {ANSWER: False}, None if pair is None else [pair]
        )
        assert len(json.dumps([json.dumps(one.answer)])) <= size


def test_models_and_contracts_without_entailment_are_refused(tmp_path: Path) -> None:
    write_tiny_bert(tmp_path / "model", labels=("no", "yes"))
    (tmp_path / "loaded").mkdir()
    with pytest.raises(CheckpointError, match="begins with 'entail'"):
        STAGE.run(section(tmp_path / "model"), out=tmp_path / "loaded")
    document = small_model.contract("zero-shot-classification", version=3)
    with pytest.raises(BundleError, match="zero_shot"):
        tasks.check(Contract.from_json(document))
    with pytest.raises(ValidationError, match="no single"):
        ZeroShot(candidate_labels=("a",), hypothesis_template="about {x}")
    settings = {"candidate_labels": ["a"], "hypothesis_template": "{}", "multi_label": False}
    document["zero_shot"] = {**settings, "entailment": 3}
    with pytest.raises(BundleError, match="entailment"):
        tasks.check(Contract.from_json(document))
    kept = Contract.from_json({**document, "zero_shot": {**settings, "entailment": 2}})
    tasks.check(kept)
    assert Contract.from_json(kept.to_json()) == replace(kept)
