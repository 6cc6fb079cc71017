"""The size of an answer is predicted: never too small, and not many times too large."""

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from optimizer.harness.inputs.batch import Batch
from optimizer.harness.server import answer_size
from optimizer.harness.server.inference import ANSWER, build_column
from optimizer.harness.tasks import fill_mask, text_classification, token_classification

ONE = {"activation": None, "multi_label": False}
LABELS = ("O", *(f"{prefix}-KIND{i}" for i in range(18) for prefix in "BI"))


def sizes(task: Any, contract: Any, texts: list[str], values: Any, encodings: Any) -> list[int]:
    """Bytes of the answers to texts as they are sent, and as they are predicted."""
    batch = Batch({}, texts, encodings, np.ones(1, bool))
    answers = task.answers(contract, values, batch)
    told = {"tokens": contract.text.max_length, "truncated": False}
    elements = build_column({}, ANSWER, [{**a, **told} for a in answers], "cpu")
    sent = json.dumps([e.decode() for e in elements])
    return [len(sent), answer_size.predict_field_bytes(task, contract, texts, {ANSWER: False})]


@pytest.mark.parametrize("sign", ["a", '"', "\x01", "é", "😀"])
@pytest.mark.parametrize("longest", [8, 600])
def test_labels_of_words_are_predicted_where_each_is_an_entity(sign: str, longest: int) -> None:
    encoding = SimpleNamespace(
        word_ids=range(longest),
        special_tokens_mask=[0] * longest,
        sequence_ids=[0] * longest,
        offsets=[(i, i + 1) for i in range(longest)],
    )
    limits = SimpleNamespace(max_length=longest)
    contract = SimpleNamespace(labels=LABELS, aggregation=None, text=limits)
    logits = np.zeros((1, longest, len(LABELS)))
    logits[..., LABELS.index("B-KIND17")] = np.pi
    sent, predicted = sizes(
        token_classification.TASK, contract, [sign * longest], logits, [encoding]
    )
    assert sent <= predicted <= 3 * sent


@pytest.mark.parametrize("labels", [LABELS, tuple(map(str, range(50))), ("😀" * 40, "\x01" * 40)])
def test_scores_of_all_labels_are_predicted(labels: tuple[str, ...]) -> None:
    contract = SimpleNamespace(labels=labels, text=SimpleNamespace(max_length=8), **ONE)
    logits = -7.1 * np.arange(len(labels))[None]
    sent, predicted = sizes(text_classification.TASK, contract, ["good"], logits, [None])
    assert sent <= predicted <= 6 * sent


@pytest.mark.parametrize("text", ["[MASK]", "😀 " * 9 + "[MASK] " * 3])
def test_the_texts_of_every_mask_are_predicted(text: str) -> None:
    masks, words = text.count("[MASK]"), text.split()
    ids = [7 if word == "[MASK]" else 1 for word in words]
    spec = SimpleNamespace(mask=7, mask_token="[MASK]", pad_id=0, max_length=64)
    contract = SimpleNamespace(labels=None, text=spec)
    decoder = SimpleNamespace(decode=lambda ids, **_: text if len(ids) > 1 else "word")
    batch = Batch({}, [text], [SimpleNamespace(ids=ids)], np.ones(1, bool), decoder)
    logits = np.random.default_rng(0).normal(size=(1, len(ids), 30)).astype(np.float32)
    (answer,) = fill_mask.TASK.answers(contract, logits, batch)  # type: ignore[arg-type]
    assert [len(row) for row in answer["masks"]] == [fill_mask.BEST] * masks
    told = {"tokens": 64, "truncated": False}
    elements = build_column({}, ANSWER, [{**answer, **told}], "cpu")
    sent = len(json.dumps([e.decode() for e in elements]))
    fields = {ANSWER: False}
    assert sent <= answer_size.predict_field_bytes(fill_mask.TASK, contract, [text], fields)  # type: ignore[arg-type]


def test_all_labels_at_once_are_predicted() -> None:
    several = {"activation": "sigmoid", "multi_label": True, "thresholds": None}
    contract = SimpleNamespace(labels=LABELS, text=SimpleNamespace(max_length=8), **several)
    logits = np.full((1, len(LABELS)), 3.3)
    sent, predicted = sizes(text_classification.TASK, contract, ["good"], logits, [None])
    assert sent <= predicted <= 6 * sent
