"""Sparse embeddings are those of sentence-transformers' SparseEncoder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from optimizer.foundation.errors import CheckpointError
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.sparse_settings import ACTIVATIONS, POOLINGS, SparseSettings
from optimizer.harness.tasks.answering import Predictor, Query, answer
from optimizer.harness.tasks.embeddings import sparse_embedding
from optimizer.load.sentence import folder as sentence_folder
from optimizer.load.stage import STAGE
from optimizer.recipe.schema import Model
from optimizer.validate.ledger.laws import answer_fields, answer_laws
from optimizer.validate.quality import quality
from optimizer.validate.quality.quality import Answers
from tests.conftest import sentences, write_tiny_bert
from tests.harness import small_model
from tests.harness.torch_predictor import torch_predictor

TEXTS = sentences(5, seed=2)


def load(source: Path, out: Path, **more: Any) -> Path:
    out.mkdir()
    STAGE.run(Model(source=str(source), task="sparse-embedding", **more), out=out)  # type: ignore[arg-type]
    return out


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of SparseEncoder with a prompt, whose answers have 9 weights."""
    modules = pytest.importorskip("sentence_transformers.sparse_encoder.modules")
    from sentence_transformers import SparseEncoder
    from sentence_transformers.base.modules import Transformer
    from transformers import BertConfig, BertForMaskedLM

    root = tmp_path_factory.mktemp("sparse")
    config = BertConfig.from_pretrained(write_tiny_bert(root / "model"))
    torch.manual_seed(0)
    BertForMaskedLM(config).save_pretrained(root / "model")
    transformer = Transformer(str(root / "model"), transformer_task="fill-mask")
    settings: dict[str, Any] = {"prompts": {"query": "this is "}, "default_prompt_name": "query"}
    pooling = modules.SpladePooling("sum", "log1p_relu")
    model = SparseEncoder(modules=[transformer, pooling], device="cpu", **settings)
    model.max_active_dims = 9
    model.save(str(root / "saved"), create_model_card=False)
    return root / "saved"


@pytest.fixture(scope="module")
def predictor(saved: Path) -> Predictor:
    return torch_predictor(load(saved, saved.parent / "loaded"))


def test_the_answers_are_the_librarys(saved: Path, predictor: Predictor) -> None:
    from sentence_transformers import SparseEncoder

    expected = SparseEncoder(str(saved), device="cpu").encode(
        TEXTS, convert_to_sparse_tensor=False, show_progress_bar=False
    )
    queries = [Query(str(i), text) for i, text in enumerate(TEXTS)]
    for one, row in zip(answer(predictor, queries, 2), expected, strict=True):
        order = row.argsort(descending=True)[:9]
        assert one.answer is not None
        assert one.answer["indices"] == order.tolist()
        np.testing.assert_allclose(one.answer["values"], row[order], rtol=1e-5)
        first = predictor.encoder.id_to_token(int(order[0]))
        assert next(iter(one.answer["strongest"])) == first


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_pooling_is_the_librarys_and_ignores_padding(
    tmp_path: Path, pooling: Any, activation: Any
) -> None:
    modules = pytest.importorskip("sentence_transformers.sparse_encoder.modules")
    settings = {"pooling": pooling, "activation": activation}
    contract, _ = small_model.opened(tmp_path, "sparse-embedding", sparse=settings)
    logits = np.random.default_rng(0).standard_t(3, (3, 7, 20)).astype(np.float32)
    mask = np.arange(7) < np.array([[7], [4], [1]])
    features = {"token_embeddings": torch.from_numpy(logits.copy())}
    features |= {"attention_mask": torch.from_numpy(mask.astype(np.int64))}
    module = modules.SpladePooling(pooling, activation).eval()
    expected = module(features)["sentence_embedding"].numpy()
    ours = sparse_embedding.decode(contract, logits, mask)
    np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-7)


def test_the_largest_weights_are_kept_as_the_library_keeps_them(predictor: Predictor) -> None:
    util = pytest.importorskip("sentence_transformers.util")
    weights = np.abs(np.random.default_rng(1).standard_normal((4, 30))).astype(np.float32)
    weights[0, 3:] = 0  # fewer than the answer may have
    expected = util.select_max_active_dims(weights, 9)
    assert np.array_equal(sparse_embedding.prune(predictor.contract, weights), expected)


def test_a_pooling_that_is_read_otherwise_is_refused(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = sentence_folder.read
    monkeypatch.setattr(
        sentence_folder, "read", lambda *given: replace(right(*given), sparse=SparseSettings())
    )
    with pytest.raises(CheckpointError, match=r"another vector than from SparseEncoder\.encode"):
        load(saved, tmp_path / "out")


def test_a_folder_of_the_other_kind_of_vectors_is_refused_with_its_task(
    saved: Path, tmp_path: Path
) -> None:
    modules = (saved / "modules.json").read_text()
    (tmp_path / "modules.json").write_text(modules.replace(".SpladePooling", ".Pooling"))
    for folder, task, right in (
        (tmp_path, "sparse-embedding", "sentence-embedding"),
        (saved, "sentence-embedding", "sparse-embedding"),
    ):
        with pytest.raises(CheckpointError, match=f"Set model.task: {right}"):
            sentence_folder.read(folder, Model(source=str(folder), task=task), 64)


@pytest.mark.parametrize("fault", ["a weight", "an id", "a token"])
def test_the_ledger_judges_each_field(predictor: Predictor, fault: str) -> None:
    reference = answer_laws.ReferencePipeline(predictor.contract, Path())
    reference.__dict__["tokenizer"] = _Tokens(predictor.encoder)
    batch = tasks.encode(predictor.contract, predictor.encoder, TEXTS[:1])
    shape = (*batch["input_ids"].shape, 120)
    logits = (np.random.default_rng(0).normal(size=shape) * 4).astype(np.float32)
    batch.encoder = predictor.encoder
    values = tasks.decode(predictor.contract, {"logits": logits}, batch)
    (one,) = tasks.build_answers(predictor.contract, values, batch)
    expected = answer_laws.EXPECTED["sparse-embedding"](reference, TEXTS[0], logits[0], batch)
    assert not list(answer_fields.differ(one, expected))
    if fault == "a weight":
        one["values"][4] *= 1 + 1e-5
    elif fault == "an id":
        one["indices"][4] += 1
    else:
        one["strongest"] = dict.fromkeys(range(9), 1.0)
    assert list(answer_fields.differ(one, expected))


class _Tokens:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self._tokenizer.id_to_token(i) for i in ids]


def test_sparse_vectors_are_compared_by_their_product() -> None:
    a, b = np.array([1.0, 0.0]), np.array([0.9, 0.9])
    rows = (np.array([5.0, 5.0]), np.array([2.0, 0.0]))
    by_product, by_cosine = (Answers((a, b), rows, dot=dot) for dot in (True, False))
    assert quality.score_pairs(by_product).tolist() == [5.0, 1.8]
    assert quality.find_nearest(by_product).tolist() == [0, 0]
    assert quality.find_nearest(by_cosine).tolist() == [1, 0]


def test_a_contract_of_weights_needs_its_section(tmp_path: Path) -> None:
    document = small_model.contract("sparse-embedding")
    assert tasks.check(Contract.from_json(document)).weighs
    del document["sparse"]
    with pytest.raises(Exception, match="sparse: None was found"):
        tasks.check(Contract.from_json(document))
