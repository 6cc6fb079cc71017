"""Tokens are joined to entities as by transformers' TokenClassificationPipeline."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from optimizer.data.sample import Sample
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.errors import BundleError
from optimizer.harness.server import answer_size
from optimizer.harness.server.inference import ANSWER
from optimizer.harness.tasks import token_classification
from optimizer.harness.tasks.answering import Predictor, Query, answer
from optimizer.load.stage import STAGE
from optimizer.recipe.schema import Model
from optimizer.validate.ledger.laws import answer_fields, answer_laws
from tests.conftest import write_tiny_bert
from tests.harness import small_model
from tests.harness.torch_predictor import torch_predictor

LABELS = ("O", "B-PER", "I-PER", "B-LOC", "PLACE-X")
STRATEGIES = ("none", "simple", "first", "average", "max")
TEXTS = ["The filmmaker's plot, Über-good!", "bad  waste-of money\tby Ünal 日本 moviegoers", "so"]


def write_byte_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer, whose tokens have no mark within a word, in place of WordPiece."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *letters]
    merges = [("l", "o"), ("g", "o"), ("Ġ", "b"), ("i", "l")]
    vocabulary += ["".join(pair) for pair in merges]
    made = Tokenizer(models.BPE({t: i for i, t in enumerate(vocabulary)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    special = [("[CLS]", 1), ("[SEP]", 2)]
    made.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", special_tokens=special)
    names = {f"{n}_token": f"[{n.upper()}]" for n in ("pad", "cls", "sep", "unk")}
    fast = PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=64, **names)
    for file in ("vocab.txt", "tokenizer_config.json", "tokenizer.json"):
        (folder / file).unlink(missing_ok=True)
    fast.save_pretrained(folder)


@pytest.fixture(scope="module", params=["WordPiece", "bytes"])
def loaded(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of load of a tiny tagger, beside its source, "model"."""
    from transformers import BertConfig, BertForTokenClassification

    root = tmp_path_factory.mktemp("tagger")
    config = BertConfig.from_pretrained(write_tiny_bert(root / "model"))
    if request.param == "bytes":
        write_byte_tokenizer(root / "model")
        config.vocab_size = 264
    config.id2label = dict(enumerate(LABELS))
    torch.manual_seed(1)
    model = BertForTokenClassification(config)
    with torch.no_grad():
        model.classifier.weight *= 20
    model.save_pretrained(root / "model")
    (root / "loaded").mkdir()
    section = Model(source=str(root / "model"), task="token-classification", aggregation="first")  # type: ignore[arg-type]
    STAGE.run(section, out=root / "loaded")
    return root / "loaded"


@pytest.fixture(scope="module")
def predictor(loaded: Path) -> Predictor:
    made = torch_predictor(loaded)
    assert made.contract.aggregation == "first"
    return made


def with_strategy(predictor: Predictor, strategy: str) -> Predictor:
    return replace(predictor, contract=replace(predictor.contract, aggregation=strategy))


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
def test_every_field_is_the_pipelines(loaded: Path, predictor: Predictor) -> None:
    from transformers import pipeline

    folder = str(loaded.parent / "model")
    judge = pipeline("token-classification", model=folder, device="cpu")
    counts = set()
    for strategy in STRATEGIES:
        queries = [Query("text", text) for text in TEXTS]
        answers = [a.answer for a in answer(with_strategy(predictor, strategy), queries, 1)]
        for ours, text in zip(answers, TEXTS, strict=True):
            assert ours is not None
            theirs = judge(text, aggregation_strategy=strategy)
            for one, other in zip(ours["entities"], theirs, strict=True):
                assert one.pop("score") == pytest.approx(other.pop("score"), rel=1e-5)
                assert one == other
        counts.add(sum(len(a["entities"]) for a in answers if a))
    assert len(counts) >= 3  # the strategies differ on these texts
    assert min(counts) > 3


def test_the_ledger_judges_each_field_by_the_pipeline(loaded: Path, predictor: Predictor) -> None:
    reference = answer_laws.ReferencePipeline(predictor.contract, loaded / "checkpoint")
    batch = tasks.encode(predictor.contract, predictor.encoder, TEXTS[:1])
    shape = (*batch["input_ids"].shape, len(LABELS))
    logits = np.random.default_rng(0).normal(0, 3, shape).astype(np.float32)
    (one,) = tasks.build_answers(predictor.contract, logits, batch)
    target = answer_laws.tagged(reference, TEXTS[0], logits[0], batch)
    assert list(answer_fields.differ(one, target)) == []
    for field, fault in (("entity_group", "?"), ("word", "?"), ("start", -1), ("score", 0.01)):
        faulty = [{**one["entities"][0], field: fault}, *one["entities"][1:]]
        assert list(answer_fields.differ({"entities": faulty}, target)), field


def test_the_gate_judges_the_labels_that_the_strategy_gives(predictor: Predictor) -> None:
    row = Sample("good filmz", words=("good", "filmz"), tags=(0, 1))
    batch = tasks.encode(predictor.contract, predictor.encoder, [row.text])
    logits = np.zeros((1, batch["input_ids"].shape[1], len(LABELS)), np.float32)
    last = logits.shape[1] - 2  # the last token of the second word
    logits[0, :, 0], logits[0, last, 1] = 2, 9
    for strategy, labels in (("first", ("O", "O")), ("max", ("O", "B-PER"))):
        contract = replace(predictor.contract, aggregation=strategy)
        args = (row.text, batch.encodings[0], logits[0], predictor.encoder)
        named = token_classification.word_labels(contract, *args)
        assert (named[0], named[5]) == labels


@pytest.mark.parametrize("strategy", ["none", "first"])
def test_a_server_predicts_the_size_of_the_answer(predictor: Predictor, strategy: str) -> None:
    asked, text = with_strategy(predictor, strategy), "日😀é good " * 9
    (one,) = answer(asked, [Query("text", text)], 1)
    sent = len(json.dumps([json.dumps(one.answer)]))
    task = tasks.look_up(asked.contract)
    size = answer_size.predict_field_bytes(task, asked.contract, [text], {ANSWER: False})
    assert sent <= size


def test_another_task_has_no_aggregation() -> None:
    document = small_model.contract("text-classification", version=3, aggregation="first")
    with pytest.raises(BundleError, match="aggregation"):
        tasks.check(Contract.from_json(document))
