"""Encoding and decoding agree with transformers and torch."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.errors import AnswerError, InputError
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.harness.tasks import token_classification
from optimizer.harness.tasks.text_classification import softmax
from tests.conftest import sentences
from tests.harness import small_model

TEXTS = sentences(6, seed=9)


def hidden(batch: Any, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shape = (*batch["input_ids"].shape, small_model.WIDTH)
    return {"last_hidden_state": rng.standard_normal(shape).astype(np.float32)}


def test_the_longest_text_decides_the_width_and_the_rest_is_padded(tmp_path: Path) -> None:
    contract, tokenizer = small_model.opened(tmp_path)
    batch = tasks.encode(contract, tokenizer, ["good", "good bad good"])
    assert batch["input_ids"].shape == (2, 5)
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert (batch["input_ids"][0, 3:] == 0).all()
    assert batch["input_ids"].dtype == np.int64


def test_transformers_gives_the_same_arrays(tiny_bert: Path) -> None:
    from transformers import AutoTokenizer

    inputs = [
        {"name": n, "dtype": "int64", "axes": ["batch", "sequence"]}
        for n in ("input_ids", "attention_mask", "token_type_ids")
    ]
    document = small_model.contract(inputs=inputs)
    contract = Contract.from_json(document)
    ours = load_tokenizer(tiny_bert, contract)
    theirs = AutoTokenizer.from_pretrained(tiny_bert)
    pairs = TEXTS[::-1]
    for second in (None, pairs):
        for length in (None, 12):
            batch = tasks.encode(contract, ours, TEXTS, second, length)
            wanted = theirs(
                TEXTS,
                second,
                padding="longest" if length is None else "max_length",
                truncation=True,
                max_length=length or contract.tokenizer.max_length,
                return_tensors="np",
            )
            assert set(batch) == set(wanted)
            for name in batch:
                np.testing.assert_array_equal(batch[name], wanted[name])


def test_a_length_is_kept_exactly_whatever_came_before(tmp_path: Path) -> None:
    contract, tokenizer = small_model.opened(tmp_path)
    for length in (4, 20, None, 4):
        batch = tasks.encode(contract, tokenizer, ["good " * 50, "bad"], None, length)
        assert batch["input_ids"].shape == (2, length or contract.tokenizer.max_length)


def test_threads_that_cut_at_other_lengths_share_a_tokenizer(tmp_path: Path) -> None:
    contract, tokenizer = small_model.opened(tmp_path)
    lengths = [2 + i % 20 for i in range(200)]

    def width(length: int) -> int:
        return int(tasks.encode(contract, tokenizer, ["good " * 50], None, length).real.sum())

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(width, lengths)) == lengths
    assert len(tokenizer.encode("good " * 50).ids) == 52


def test_each_way_a_request_can_be_wrong_is_named(tmp_path: Path) -> None:
    contract, tokenizer = small_model.opened(tmp_path)
    requests: list[tuple[tuple[Any, ...], str]] = [
        (([],), "texts"),
        (("a text",), "texts"),
        ((["good", 3],), r"texts\[1\]"),
        ((["good"], ["a", "b"]), "pairs"),
        ((["good"], None, 33), "length"),
        ((["good"], None, 1), "length"),
    ]
    for arguments, where in requests:
        with pytest.raises(InputError, match=where):
            tasks.encode(contract, tokenizer, *arguments)


@pytest.mark.parametrize("task", ["sentence-embedding", "feature-extraction"])
def test_more_padding_changes_no_bit_of_an_answer(task: str, tmp_path: Path) -> None:
    contract, tokenizer = small_model.opened(tmp_path, task)
    narrow = tasks.encode(contract, tokenizer, TEXTS)
    wide = tasks.encode(contract, tokenizer, TEXTS, None, 32)
    outputs = hidden(narrow)
    padded = hidden(wide, seed=1)  # what a model leaves in padded places is arbitrary
    width = narrow["input_ids"].shape[1]
    padded["last_hidden_state"][:, :width] = outputs["last_hidden_state"]
    a = tasks.build_answers(contract, tasks.decode(contract, outputs, narrow), narrow)
    b = tasks.build_answers(contract, tasks.decode(contract, padded, wide), wide)
    assert a == b


def test_other_texts_in_the_batch_change_no_bit_of_an_answer(tmp_path: Path) -> None:
    contract, tokenizer = small_model.opened(tmp_path)
    batch = tasks.encode(contract, tokenizer, TEXTS)
    outputs = hidden(batch)
    together = tasks.decode(contract, outputs, batch)
    for i, text in enumerate(TEXTS):
        alone = tasks.encode(contract, tokenizer, [text])
        width = alone["input_ids"].shape[1]
        own = {"last_hidden_state": outputs["last_hidden_state"][i : i + 1, :width]}
        np.testing.assert_array_equal(tasks.decode(contract, own, alone)[0], together[i])


@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("normalize", [True, False])
def test_an_embedding_is_what_torch_computes(pooling: str, normalize: bool, tmp_path: Path) -> None:
    contract, tokenizer = small_model.opened(tmp_path, pooling=pooling, normalize=normalize)
    batch = tasks.encode(contract, tokenizer, TEXTS)
    outputs = hidden(batch)
    states = torch.from_numpy(outputs["last_hidden_state"])
    mask = torch.from_numpy(batch["attention_mask"])[..., None].float()
    wanted = states[:, 0] if pooling == "cls" else (states * mask).sum(1) / mask.sum(1)
    if normalize:
        wanted = torch.nn.functional.normalize(wanted, dim=1)
    got = tasks.decode(contract, outputs, batch)
    np.testing.assert_allclose(got, wanted.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_an_answer_that_is_no_number_is_an_error(wrong: float, tmp_path: Path) -> None:
    contract, tokenizer = small_model.opened(tmp_path)
    batch = tasks.encode(contract, tokenizer, ["good", "good bad good"])
    given = hidden(batch)
    before = tasks.decode(contract, given, batch)
    given["last_hidden_state"][0, 3:] = wrong  # padding says nothing
    assert np.array_equal(tasks.decode(contract, given, batch), before)
    given["last_hidden_state"][1, 4, 0] = wrong
    with pytest.raises(AnswerError, match="the first in row 1"):
        tasks.decode(contract, given, batch)


def test_softmax_survives_logits_that_overflow_exp() -> None:
    got = softmax(np.array([[1000.0, 1001.0, -1000.0]], np.float32))
    want = torch.softmax(torch.tensor([[1000.0, 1001.0, -1000.0]]), -1).numpy()
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_classifier_answers_its_likeliest_label(tmp_path: Path) -> None:
    contract, tokenizer = small_model.opened(tmp_path, "text-classification")
    batch = tasks.encode(contract, tokenizer, ["good", "bad"])
    logits = {"logits": np.array([[0, 3, 1], [4, 1, 1]], np.float32)}
    made = tasks.build_answers(contract, tasks.decode(contract, logits, batch), batch)
    assert [a["label"] for a in made] == ["B-x", "O"]
    assert all(sum(a["scores"].values()) == pytest.approx(1) for a in made)
    assert all(a["score"] == max(a["scores"].values()) for a in made)


def test_transformers_finds_the_same_entities(tiny_bert: Path) -> None:
    from transformers import AutoTokenizer, BertConfig, BertForTokenClassification
    from transformers.pipelines import TokenClassificationPipeline

    torch.manual_seed(0)
    labels = ["O", "B-x", "I-x", "B-y", "I-y", "z"]
    theirs = AutoTokenizer.from_pretrained(tiny_bert)
    config = BertConfig(
        vocab_size=len(theirs),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        initializer_range=1.0,
        id2label=dict(enumerate(labels)),
    )
    model = BertForTokenClassification(config).eval()
    pipe = TokenClassificationPipeline(
        model=model, tokenizer=theirs, aggregation_strategy="first", device="cpu"
    )
    contract = Contract.from_json(small_model.contract("token-classification", labels=labels))
    ours = load_tokenizer(tiny_bert, contract)
    texts = ["good film xyz staff great qq, place", *(t[:60] for t in sentences(6, seed=4))]
    batch = tasks.encode(contract, ours, texts)
    with torch.no_grad():
        logits = model(**{k: torch.from_numpy(v) for k, v in batch.items()}).logits.numpy()
    made = tasks.build_answers(contract, tasks.decode(contract, {"logits": logits}, batch), batch)
    kept = 0
    for text, answer in zip(texts, made, strict=True):
        wanted = [(e["entity_group"], e["start"], e["end"]) for e in pipe(text)]
        assert [(e["label"], e["start"], e["end"]) for e in answer["entities"]] == wanted
        scores = [float(e["score"]) for e in pipe(text)]
        assert [e["score"] for e in answer["entities"]] == pytest.approx(scores, rel=1e-4)
        kept += len(wanted)
    assert kept >= 10


def test_a_begin_splits_and_a_gap_splits_entities() -> None:
    def word(label: str, start: int) -> dict[str, Any]:
        return {"label": label, "score": 1.0, "text": "w", "start": start, "end": start + 1}

    text = "a b c d e f g"
    labels = ["B-x", "I-x", "B-x", "O", "I-x", "I-y", "I-y"]
    found = token_classification.join_entities(text, [word(n, 2 * i) for i, n in enumerate(labels)])
    assert [(e["label"], e["text"]) for e in found] == [
        ("x", "a b"),
        ("x", "c"),
        ("x", "e"),
        ("y", "f g"),
    ]
