"""fill-mask answers as transformers' pipeline, and refuses a text without a mask."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from optimizer.data.sample import Sample
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.errors import BundleError, InputError
from optimizer.harness.tasks import fill_mask
from optimizer.harness.tasks.answering import Predictor, Query, answer
from optimizer.load.stage import STAGE
from optimizer.recipe.schema import Model
from optimizer.validate.ledger.laws import answer_fields, answer_laws
from optimizer.validate.quality import quality
from optimizer.validate.quality.quality import Answers
from tests.conftest import sentences, write_tiny_bert
from tests.harness import small_model
from tests.harness.torch_predictor import torch_predictor

TEXTS = ["the [MASK] was good", "a [MASK] , a [MASK] and bad", *sentences(3, seed=2)]


@pytest.fixture(scope="module")
def filler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of load of a tiny masked language model, beside its source, "model"."""
    from transformers import BertConfig, BertForMaskedLM

    root = tmp_path_factory.mktemp("filler")
    config = BertConfig.from_pretrained(write_tiny_bert(root / "model"))
    torch.manual_seed(0)
    BertForMaskedLM(config).save_pretrained(root / "model")
    (root / "loaded").mkdir()
    STAGE.run(Model(source=str(root / "model"), task="fill-mask"), out=root / "loaded")  # type: ignore[arg-type]
    return root / "loaded"


@pytest.fixture(scope="module")
def predictor(filler: Path) -> Predictor:
    return torch_predictor(filler)


def ask(predictor: Predictor, *texts: str) -> list[Any]:
    return list(answer(predictor, [Query(f"text {i}", t) for i, t in enumerate(texts)], 8))


def test_the_answers_are_the_pipelines(filler: Path, predictor: Predictor) -> None:
    from transformers import pipeline

    judge = pipeline("fill-mask", model=str(filler.parent / "model"), device="cpu")
    for text, one in zip(TEXTS[:2], ask(predictor, *TEXTS[:2]), strict=True):
        theirs = judge(text)
        theirs = [theirs] if isinstance(theirs[0], dict) else theirs
        assert len(one.answer["masks"]) == len(theirs) == text.count("[MASK]")
        for row, wanted in zip(one.answer["masks"], theirs, strict=True):
            assert [t.pop("score") for t in row] == pytest.approx([t.pop("score") for t in wanted])
            assert row == wanted


def test_a_text_without_a_mask_is_refused_by_the_tokens_name(predictor: Predictor) -> None:
    late = "good " * 80 + "[MASK]"
    plain, cut, right = ask(predictor, TEXTS[2], late, TEXTS[0])
    assert isinstance(plain.error, InputError)
    assert "the text has no [MASK]. Put [MASK] where" in str(plain.error)
    assert "no [MASK] among its first 64 tokens" in str(cut.error)
    assert right.answer


def test_the_ledger_judges_each_field_by_the_pipeline(filler: Path, predictor: Predictor) -> None:
    reference = answer_laws.ReferencePipeline(predictor.contract, filler / "checkpoint")
    batch = tasks.encode(predictor.contract, predictor.encoder, TEXTS[:1])
    logits = np.random.default_rng(0).normal(size=(*batch["input_ids"].shape, 120)) * 4
    logits = logits.astype(np.float32)
    (one,) = tasks.build_answers(predictor.contract, logits, batch)
    wanted = answer_laws.filled(reference, TEXTS[0], logits[0], batch)
    assert list(answer_fields.differ(one, wanted)) == []
    for field, fault in (("sequence", "?"), ("token_str", "?"), ("token", -1), ("score", 0.9)):
        row = [{**one["masks"][0][0], field: fault}, *one["masks"][0][1:]]
        assert list(answer_fields.differ({"masks": [row]}, wanted)), field


def test_a_text_of_the_data_gets_a_mask_to_be_asked_with(predictor: Predictor) -> None:
    assert fill_mask.ask(predictor.contract, "what a film") == "what [MASK] film"
    assert fill_mask.ask(predictor.contract, "film") == "[MASK]"
    assert fill_mask.ask(predictor.contract, TEXTS[0]) == TEXTS[0]


def test_the_same_tokens_of_a_text_are_masked_in_every_batch(predictor: Predictor) -> None:
    contract, texts = predictor.contract, TEXTS[2:]
    batch = tasks.encode(contract, predictor.encoder, texts)
    masked, places = fill_mask.mask_tokens(contract, batch)
    assert (masked["input_ids"][places] == contract.text.mask_id).all()
    assert (masked["input_ids"][~places] == batch["input_ids"][~places]).all()
    for i, text in enumerate(texts):
        alone = tasks.encode(contract, predictor.encoder, [text])
        size = alone["input_ids"].shape[1]
        own = places[i, 1 : size - 1]
        assert own.sum() == places[i].sum() == max(1, round(0.15 * (size - 2)))
        assert (fill_mask.mask_tokens(contract, alone)[1][0] == places[i, :size]).all()


def test_the_metrics_tell_a_worse_model_from_an_equal_one() -> None:
    rng = np.random.default_rng(0)
    likely = tuple(-rng.exponential(size=4) for _ in range(200))
    best = tuple(rng.integers(0, 50, 4) for _ in range(200))
    worse = Answers(
        tuple(x - rng.exponential(0.2, 4) for x in likely),
        words=tuple(np.where(rng.random(4) < 0.2, 0, ids) for ids in best),
    )
    float_model, rows = Answers(likely, words=best), [Sample(f"{i}") for i in range(200)]
    for name in ("log_likelihood", "agreement"):
        for candidate, verdict in ((float_model, "pass"), (worse, "fail")):
            metric = quality.compare(name, rows, float_model, candidate)
            assert quality.judge(name, metric, 200, 0.05, 0.95, None)[0].verdict == verdict


def test_a_contract_without_a_mask_is_refused() -> None:
    document = small_model.contract("fill-mask", version=3)
    with pytest.raises(BundleError, match="mask_id"):
        tasks.check(Contract.from_json(document))
    document["tokenizer"] |= {"mask_id": 7, "mask_token": "[MASK]"}
    kept = Contract.from_json(document)
    tasks.check(kept)
    assert Contract.from_json(kept.to_json()) == kept
