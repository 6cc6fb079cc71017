"""Questions are answered as by transformers' pipeline: windows, spans, and no answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from optimizer.data import answers as right_answers
from optimizer.data.answers import read_answers
from optimizer.data.sample import Sample
from optimizer.foundation.errors import DataError
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.errors import BundleError, InputError
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.harness.server.model import RequestLimits, ServedModel
from optimizer.harness.server.refusals import TooLargeError
from optimizer.harness.tasks.answering import Predictor, Query, answer
from optimizer.model.checkpoint.model import join_outputs
from optimizer.validate.ledger.laws import answer_fields
from optimizer.validate.ledger.laws.rows import span_laws
from optimizer.validate.quality import quality
from optimizer.validate.quality.quality import Answers
from tests.harness import small_model

CONTEXT = "The film was a good one, and the plot was bad; a waste of money but funny. " * 2
QUESTION = "what was bad?"
SETTINGS = {"doc_stride": 6, "max_answer_len": 4, "handle_impossible_answer": True, "top_k": 3}
TABLE = np.random.default_rng(0).normal(0, 3, (len(small_model.VOCABULARY), 2)).astype(np.float32)
THEIRS = [
    {"score": 1.7044740319252014, "start": 23, "end": 37, "answer": ", and the plot"},
    {"score": 0.47891932469792664, "start": 68, "end": 73, "answer": "funny"},
    {"score": 0.22046317532658577, "start": 29, "end": 37, "answer": "the plot"},
]
"""Answers of QuestionAnsweringPipeline of transformers 4.57.1 to QUESTION, of `logits`."""


def logits(ids: Any) -> Any:
    """Logits (..., tokens, 2) that depend on a token and its place."""
    places = np.arange(ids.shape[-1], dtype=np.float32)[:, None]
    return TABLE[ids] + 0.2 * (places % 7)


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> Predictor:
    document = small_model.contract("question-answering", version=3, answers=SETTINGS)
    contract = Contract.from_json(document)
    contract = replace(contract, tokenizer=replace(contract.text, max_length=24))
    tasks.check(contract)
    folder = small_model.tokenizer(tmp_path_factory.mktemp("answers")).parent
    encoder = load_tokenizer(folder, contract)

    def infer(arrays: Mapping[str, Any]) -> dict[str, Any]:
        return {"logits": logits(arrays["input_ids"])}

    return Predictor(contract, encoder, infer)


def ask(predictor: Predictor, *pairs: tuple[str, str | None]) -> list[Any]:
    queries = [Query(f"line {i + 1}", *pair) for i, pair in enumerate(pairs)]
    return list(answer(predictor, queries, 2))


def with_settings(predictor: Predictor, **changes: Any) -> Predictor:
    answers = replace(predictor.contract.spans, **changes)
    return replace(predictor, contract=replace(predictor.contract, answers=answers))


def test_the_answers_are_those_of_transformers_4(predictor: Predictor) -> None:
    (one,) = ask(predictor, (QUESTION, CONTEXT))
    for ours, theirs in zip(one.answer["answers"], THEIRS, strict=True):
        assert ours.pop("score") == pytest.approx(theirs["score"], rel=1e-5)
        assert ours == {n: v for n, v in theirs.items() if n != "score"}
        assert CONTEXT[ours["start"] : ours["end"]] == ours["answer"]
    (best,) = ask(with_settings(predictor, top_k=1), (QUESTION, CONTEXT))
    assert best.answer["answer"] == THEIRS[0]["answer"]
    assert "answers" not in best.answer
    (short,) = ask(predictor, (QUESTION, "money"))
    assert len(one.answer["answers"]) == 3
    whole = len(predictor.encoder.encode(QUESTION, CONTEXT).ids)
    assert (one.tokens, one.truncated) == (whole, False)
    assert {a["answer"] for a in short.answer["answers"]} == {"money", ""}


def test_what_cannot_be_answered_is_refused_by_its_reason(predictor: Predictor) -> None:
    rows = (" ", "good"), (QUESTION, None), (QUESTION, " "), ("good " * 30, "bad")
    for one, why in zip(
        ask(predictor, *rows),
        ("question has no token", "context is missing", "context", "leaves 0"),
        strict=True,
    ):
        assert isinstance(one.error, InputError)
        assert why in str(one.error)
    with pytest.raises(BundleError, match="answers"):
        tasks.check(replace(predictor.contract, answers=None))


def test_a_fault_in_a_field_of_an_answer_is_caught(predictor: Predictor) -> None:
    tokenizer = SimpleNamespace(cls_token_id=2)
    reference: Any = SimpleNamespace(contract=predictor.contract, tokenizer=tokenizer)
    (row,) = tasks.encode_each(predictor.contract, predictor.encoder, [QUESTION], [CONTEXT])
    windows = [part.encoding for part in row.parts]
    assert len(windows) > 2
    target = span_laws.expected(
        reference, CONTEXT, windows, [logits(np.array(w.ids)) for w in windows]
    )
    (one,) = ask(predictor, (QUESTION, CONTEXT))
    assert list(answer_fields.differ(one.answer, target)) == []
    for field, fault in (("answer", "?"), ("start", -1), ("end", -1), ("score", 0.5)):
        assert list(answer_fields.differ({**one.answer, field: fault}, target)), field


def test_a_server_reads_windows_as_rows_and_limits_them(predictor: Predictor) -> None:
    task = tasks.look_up(predictor.contract)
    bundle: Any = SimpleNamespace(
        manifest={"name": "m", "version": "1"},
        contract=predictor.contract,
        task=task,
        engine={"target": "cpu", "device": "cpu"},
        predictor=predictor,
        threads=1,
        reentrant=True,
    )
    model, pairs = ServedModel(bundle, RequestLimits(8)), [CONTEXT, "so good"]
    rows = model.encode([QUESTION, QUESTION], pairs)
    parts = [part for row in rows for part in row.parts]
    merged = model.merge(rows, [answer for part in parts for answer in model.run([part])])
    assert merged == [one.answer for one in ask(predictor, *((QUESTION, c) for c in pairs))]
    with pytest.raises(TooLargeError, match="in 15 rows; accepted: up to 8"):
        model.encode([QUESTION] * 3, [CONTEXT, CONTEXT, "good"])


def test_the_model_gives_start_and_end_as_one_output_in_every_form() -> None:
    from transformers import BertConfig, BertForQuestionAnswering

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=64, intermediate_size=32, max_position_embeddings=32, **sizes)
    theirs, ours = BertForQuestionAnswering(config).eval(), BertForQuestionAnswering(config).eval()
    ours.load_state_dict(theirs.state_dict())
    join_outputs(ours, "question-answering")
    ids = torch.arange(10)[None]
    with torch.no_grad():
        result, expected = ours(input_ids=ids), theirs(input_ids=ids)
    both = torch.stack([expected.start_logits, expected.end_logits], -1)
    for logits in (result[0], result["logits"], result.logits):
        assert torch.allclose(logits, both)


def test_exact_match_and_f1_are_squads() -> None:
    right = ["the Eiffel-Tower", "tower"]
    assert right_answers.exact_match("EiffelTower!", right) == 1
    assert right_answers.f1("a big tower", right) == pytest.approx(2 / 3)
    assert [right_answers.f1(a, []) for a in ("", "the", "tower")] == [1, 1, 0]
    assert right_answers.exact_match("", right) == 0


@pytest.mark.parametrize("name", ["f1", "exact_match", "agreement"])
def test_the_metrics_tell_a_worse_model_from_an_equal_one(name: str) -> None:
    rows = [Sample(f"q{i}", text_pair=f"c{i}", answers=(f"one word {i}",)) for i in range(300)]
    vectors = tuple(np.array([float(i)]) for i in range(300))
    right = tuple(f"one word {i}" for i in range(300))
    worse = tuple(a if i % 8 else "word" for i, a in enumerate(right))
    baseline = Answers(vectors, spans=right)
    for answers, verdict in ((right, "pass"), (worse, "fail")):
        metric = quality.compare(name, rows, baseline, Answers(vectors, spans=answers))
        assert quality.judge(name, metric, 300, 0.02, 0.95, None)[0].verdict == verdict


def test_answers_are_read_from_every_usual_form() -> None:
    for cell in ("Ada", ["Ada"], {"text": ["Ada"], "answer_start": [0]}, [{"text": "Ada"}]):
        assert read_answers(cell, "") == ("Ada",)
    assert read_answers('{"text": ["Ada", "Byron"]}', "") == ("Ada", "Byron")
    for cell in ([], "", {"text": [], "answer_start": []}, "[]"):
        assert read_answers(cell, "") == ()
    for cell in (3, {"answer": "Ada"}, "{'text': ['Ada']}"):
        with pytest.raises(DataError, match="row 7"):
            read_answers(cell, "row 7")
