"""Every field of an answer is transformers' own: faults in one field are caught at the harness, and
right answers are not refused, whatever the tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.generate import Completion, loop
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.harness.tasks import answering, text_classification, token_classification
from optimizer.validate.ledger import hops, ledger
from optimizer.validate.ledger.laws import answer_laws
from optimizer.validate.ledger.laws.answer_fields import FREE, Near, OneOf, differ
from optimizer.validate.ledger.laws.decoder import generation_laws
from optimizer.validate.materials import Materials
from tests.conftest import WORDS, sentences, write_tiny_bert
from tests.harness import small_model
from tests.validate.ledger.faults.test_mutants import assert_caught
from tests.validate.runs import SCHEMES, Run, make, recipe

TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")


@pytest.fixture(scope="module")
def tagger_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A token classifier with random weights, so random tags."""
    from transformers import BertConfig, BertForTokenClassification

    root = tmp_path_factory.mktemp("tagger")
    config = BertConfig.from_pretrained(write_tiny_bert(root / "tagger", labels=TAGS, layers=1))
    torch.manual_seed(3)
    model = BertForTokenClassification(config)
    torch.nn.init.normal_(model.classifier.weight, std=0.5)
    model.save_pretrained(root / "tagger")
    (root / "data").mkdir()
    task = "token-classification"
    return make(root, recipe(str(root / "tagger"), root / "data", SCHEMES["static"], task))


@pytest.fixture(scope="module")
def of_task(tagger_run: Run, classifier_run: Run, runs: dict[str, Run]) -> dict[str, Run]:
    return {
        "token-classification": tagger_run,
        "text-classification": classifier_run,
        "sentence-embedding": runs["static"],
    }


@pytest.fixture(scope="module")
def right(of_task: dict[str, Run]) -> Callable[[str], Materials]:
    """right(task) -> materials of a run whose answers the harness hop accepts."""

    @cache
    def made(task: str) -> Materials:
        materials = of_task[task].materials()
        assert ledger.run_hop(hops.harness, materials).ok
        return materials

    return made


Fault = Callable[[Any], Any]
"""The right value of a function of the harness -> the value with the fault."""


def one_character_short(entities: Any) -> Any:
    return [{**e, "end": e["end"] - 1} for e in entities]


def text_of_the_last_word(entities: Any) -> Any:
    return [{**e, "text": e["text"].split()[-1]} for e in entities]


def score_of_the_first_word(tagged: Any) -> Any:
    return [{**w, "score": w["score"] * 0.999} for w in tagged]


def begins_lost(tagged: Any) -> Any:
    return [{**w, "label": w["label"].replace("B-", "I-")} for w in tagged]


def of_half_the_logits(probabilities: Any) -> Any:
    root = np.sqrt(probabilities)
    return root / root.sum(-1, keepdims=True)


def four_digits(answers: Any) -> Any:
    return [{"embedding": [round(x, 4) for x in a["embedding"]]} for a in answers]


def one_token_more(answered: Any) -> Any:
    return (replace(one, tokens=one.tokens + 1) for one in answered)


def read_whole(answered: Any) -> Any:
    return (replace(one, kept=one.tokens) for one in answered)


FAULTS: dict[str, tuple[str, Any, str, Fault]] = {
    "an entity ends one character short": (
        "token-classification", token_classification, "join_entities", one_character_short),
    "an entity's text is its last word": (
        "token-classification", token_classification, "join_entities", text_of_the_last_word),
    "a word's score is a thousandth less": (
        "token-classification", token_classification, "words", score_of_the_first_word),
    "words that begin an entity continue it": (
        "token-classification", token_classification, "words", begins_lost),
    "tags' probabilities of half the logits": (
        "token-classification", token_classification, "softmax", of_half_the_logits),
    "probabilities of half the logits": (
        "text-classification", text_classification, "softmax", of_half_the_logits),
    "probabilities the other way round": (
        "text-classification", text_classification, "softmax", lambda p: p[:, ::-1]),
    "a batch's answers in another order": (
        "text-classification", answering, "build_answers", lambda answers: answers[::-1]),
    "one token too many counted": (
        "text-classification", answer_laws, "answer", one_token_more),
    "a text that was cut said to be whole": (
        "text-classification", answer_laws, "answer", read_whole),
    "an embedding of four digits": (
        "sentence-embedding", answering, "build_answers", four_digits),
}  # fmt: skip


def planted(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, fault: Callable[[Any], Any]
) -> None:
    right = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **options: fault(right(*args, **options)))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_one_field_is_caught_at_the_harness(
    right: Callable[[str], Materials], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    task, module, function, fault = FAULTS[name]
    materials = right(task)
    planted(monkeypatch, module, function, fault)
    assert_caught(materials, "harness", first="harness")


def test_right_answers_are_not_refused(of_task: dict[str, Run]) -> None:
    """Those of a classifier: test_a_clean_classifier_raises_nothing."""
    entries = ledger.run(of_task["token-classification"].materials())
    assert [(e.hop, e.problems) for e in entries if e.ok is False] == []


def test_a_task_without_a_reference_is_said_to_be_unjudged(
    right: Callable[[str], Materials], monkeypatch: pytest.MonkeyPatch
) -> None:
    materials = right("sentence-embedding")
    monkeypatch.delitem(answer_laws.EXPECTED, "sentence-embedding")
    entry = ledger.run_hop(hops.harness, materials)
    assert entry.ok
    assert "fields of answers" in entry.unproven


def bytes_in_pieces() -> Any:
    """A byte-level tokenizer, whose tokens hold the space before a word."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<unk>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([" ".join(WORDS)], trainer)
    return made


def unigrams() -> Any:
    """A tokenizer of the SentencePiece kind, whose words end at white space only."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<pad>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator([" ".join(WORDS), *sentences(40)], trainer)
    return made


@pytest.mark.parametrize("make_tokenizer", [bytes_in_pieces, unigrams])
@pytest.mark.parametrize("names", [TAGS, ("O", "S-PER", "plain", "B-LOC")])
def test_tagged_words_and_entities_are_transformers_whatever_the_tokenizer(
    tmp_path: Path, make_tokenizer: Callable[[], Any], names: tuple[str, ...]
) -> None:
    from transformers import BertConfig, PreTrainedTokenizerFast

    made = make_tokenizer()
    PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>"
    ).save_pretrained(tmp_path)
    config = BertConfig(
        id2label=dict(enumerate(names)), label2id={n: i for i, n in enumerate(names)}
    )
    config.save_pretrained(tmp_path)
    document = small_model.contract("token-classification", labels=names)
    document["tokenizer"] |= {"pad_token": "<pad>", "pad_id": made.token_to_id("<pad>")}
    contract = Contract.from_json(document)
    texts = ["(good film), place-staff!", "  two  spaces", "naïve 😀 film", *sentences(6, seed=4)]
    batch = tasks.encode(contract, load_tokenizer(tmp_path, contract), texts)
    shape = (*batch["input_ids"].shape, len(names))
    logits = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    reference = answer_laws.ReferencePipeline(contract, tmp_path)
    for text, found, row, real in zip(
        texts, tasks.build_answers(contract, logits, batch), logits, batch.real, strict=True
    ):
        wanted = answer_laws.tagged(reference, text, row[real], batch)
        assert list(differ(found, wanted)) == []
        assert found["words"]


def test_labels_that_are_equally_likely_are_both_right() -> None:
    scores = {"a": Near(0.5, 1e-7), "b": Near(0.5 - 1e-8, 1e-7), "c": Near(0.0, 1e-9)}
    either = answer_laws._equal(scores, scores["a"])
    assert list(differ("b", either)) == []
    assert list(differ("c", either))


def test_probabilities_stay_within_their_bound_of_those_in_float64() -> None:
    logits = (30 * np.random.default_rng(1).standard_t(3, (200, 50))).astype(np.float32)
    wide = logits.astype(np.float64)
    exact = np.exp(wide - wide.max(1, keepdims=True))
    exact /= exact.sum(1, keepdims=True)
    far = np.abs(text_classification.softmax(logits) - exact)
    bounds = np.stack([answer_laws.bound_rounding(row) for row in logits])
    assert (far <= bounds / 2).all()
    assert bounds.max() < 1e-4


def test_a_field_that_is_missing_more_or_different_is_named() -> None:
    wanted = {"a": 1, "rows": [{"x": Near(np.array([1.0, 2.0]), 0.1)}], "free": FREE}
    right = {"a": 1, "rows": [{"x": [1.05, 2.0]}], "free": 3}
    assert list(differ(right, wanted)) == []
    assert list(differ({**right, "rows": [{"x": [1.0, 2.2]}]}, wanted)) == [
        "rows[0].x[1] is 2.2, the reference's 2"
    ]
    for wrong in ({"a": 1}, {**right, "b": 1}, {**right, "a": 2}, {**right, "rows": []}):
        assert len(list(differ(wrong, wanted))) == 1
    assert list(differ("z", OneOf(frozenset("xy")), "label"))


def test_a_generated_text_that_lost_a_character_is_caught(tmp_path: Path) -> None:
    made = bytes_in_pieces()
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(tokenizer_object=made)
    prompt, drawn = made.encode("good film").ids, made.encode(" great staff").ids
    right = Completion(" great staff", tuple(drawn), "length", len(prompt))
    assert answer_laws.compare_generated(reference, prompt, right, len(drawn)) == []
    for field, wrong in {"text": "great staff", "finish": "eos", "prompt_tokens": 1}.items():
        answer = SimpleNamespace(
            tokens=right.tokens, to_json=lambda f=field, w=wrong: {**right.to_json(), f: w}
        )
        (problem,) = answer_laws.compare_generated(reference, prompt, answer, len(drawn))
        assert problem.startswith(field)


def test_a_text_without_its_last_character_is_caught_at_the_harness_of_a_decoder(
    decoder_runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = loop.generate

    def shorter(*args: Any, **options: Any) -> list[Completion]:
        made = right(*args, **options)
        return [Completion(c.text[:-1], c.tokens, c.finish, c.prompt_tokens) for c in made]

    monkeypatch.setattr(generation_laws, "generate", shorter)
    entry = ledger.run_hop(generation_laws.harness, decoder_runs["rtn"].materials())
    assert entry.ok is False
    assert entry.problems[0].startswith("text is")
