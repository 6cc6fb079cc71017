"""Load compares its reading with the library, and refuses another vector or an unread key."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from optimizer.foundation.errors import CheckpointError
from optimizer.harness.contract import read
from optimizer.harness.embedding_settings import EmbeddingSettings
from optimizer.load.sentence import folder, library
from tests.conftest import write_tokenizer
from tests.load.conftest import Load, edit_json
from tests.load.sentence.conftest import Save

PROMPTS = {"query": "this is good : ", "other": "the "}


@pytest.fixture
def full(save: Save) -> Path:
    """A folder with every kind of module and setting."""
    from sentence_transformers.sentence_transformer.modules import Dense, LayerNorm, Normalize

    torch.manual_seed(0)
    parts = [Dense(128, 32), LayerNorm(32), Normalize()]
    settings: dict[str, Any] = {"prompts": PROMPTS, "default_prompt_name": "query"}
    return save(("mean", "max"), *parts, include_prompt=False, truncate_dim=16, **settings)


def test_a_folder_with_every_module_is_read_as_the_library_reads_it(
    load: Load, full: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contract = read(load(full) / "contract.json")
    assert "texts have the vectors of sentence-transformers' encode" in capsys.readouterr().err
    assert (contract.pooling, contract.normalize) == (("mean", "max"), True)
    settings = contract.vectors
    assert (settings.prompt, settings.dimensions, settings.similarity) == ("query", 16, "cosine")
    assert [layer.kind for layer in contract.vectors.layers] == ["dense", "layer_norm"]
    assert contract.layer_weights.shape == (128 * 32 + 32 + 64,)


MISREAD: dict[str, Any] = {
    "another pooling": lambda r: replace(r, pooling="mean", settings=EmbeddingSettings()),
    "no prompt": lambda r: replace(r, settings=replace(r.settings, prompt=None)),
    "another named prompt": lambda r: replace(
        r, settings=replace(r.settings, prompts={**PROMPTS, "other": "these "})
    ),
    "the prompt's tokens": lambda r: replace(r, settings=replace(r.settings, include_prompt=True)),
    "all numbers": lambda r: replace(r, settings=replace(r.settings, dimensions=None)),
    "no normalize": lambda r: replace(r, normalize=False),
    "a weight": lambda r: replace(r, values=r.values * 1.001),
}


@pytest.mark.parametrize("name", MISREAD)
def test_what_is_read_otherwise_is_refused(
    load: Load, full: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = folder.read
    monkeypatch.setattr(folder, "read", lambda *given: MISREAD[name](right(*given)))
    with pytest.raises(CheckpointError, match=r"another vector than from SentenceTransformer"):
        load(full)


def test_a_length_that_the_library_cuts_at(load: Load, save: Save) -> None:
    saved = save("mean")
    edit_json(saved / "tokenizer_config.json", truncation_side="left")
    with pytest.raises(CheckpointError, match="another vector"):
        load(saved)


def test_lower_case_before_a_tokenizer_that_keeps_it(load: Load, save: Save) -> None:
    saved = save("mean")
    tokenizer = saved / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"lowercase": true', '"lowercase": false'))
    edit_json(saved / "tokenizer_config.json", do_lower_case=False)
    edit_json(saved / "sentence_bert_config.json", do_lower_case=True)
    assert '"Lowercase"' in (load(saved) / "checkpoint/tokenizer.json").read_text()


def test_an_unread_key_is_refused_by_name_without_the_library(
    load: Load, full: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(library, "is_installed", lambda: False)
    load(full)
    assert "not installed" in capsys.readouterr().err
    edit_json(full / "sentence_bert_config.json", processing_kwargs={"text": {"padding": False}})
    with pytest.raises(CheckpointError, match=r"processing_kwargs is .*not installed"):
        load(full)


def test_a_folder_that_the_library_cannot_open_is_not_compared(
    load: Load, save: Save, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = save("mean")
    edit_json(saved / "config_sentence_transformers.json", requirements={"transformers": ">=999"})
    load(saved)
    assert "the library does not answer" in capsys.readouterr().err


@pytest.fixture
def deberta(tmp_path: Path) -> Path:
    """DeBERTa, whose positions fall into buckets, in which rounding at random flips some."""
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    from sentence_transformers import SentenceTransformer
    from transformers import DebertaV2Config, DebertaV2Model

    (tmp_path / "plain").mkdir()
    config = DebertaV2Config(
        vocab_size=write_tokenizer(tmp_path / "plain"),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        relative_attention=True,
        position_buckets=16,
        pos_att_type=["p2c", "c2p"],
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    DebertaV2Model(config).save_pretrained(tmp_path / "plain")
    parts = [modules.Transformer(str(tmp_path / "plain")), modules.Pooling(32)]
    SentenceTransformer(modules=parts, device="cpu").save(
        str(tmp_path / "saved"), create_model_card=False
    )
    return tmp_path / "saved"


def test_another_activation_of_deberta_is_refused(load: Load, deberta: Path) -> None:
    load(deberta)
    edit_json(deberta / "sentence_bert_config.json", config_args={"hidden_act": "relu"})
    with pytest.raises(CheckpointError, match="another vector"):
        load(deberta)


def test_the_configs_of_older_versions_are_read(load: Load, save: Save) -> None:
    saved = save("mean")
    (saved / "sentence_bert_config.json").rename(saved / "sentence_roberta_config.json")
    edit_json(saved / "sentence_roberta_config.json", max_seq_length=12)
    assert read(load(saved) / "contract.json").text.max_length == 12


def test_a_large_model_is_compared_on_fewer_texts_where_memory_is_free(
    load: Load, save: Save, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = save("mean")
    monkeypatch.setattr(library, "LARGEST", 0)
    load(saved)
    assert "load: 9 texts have the vectors" in capsys.readouterr().err
    monkeypatch.setattr(library.memory, "read_free", lambda: 1000)
    load(saved)
    assert "to compare with sentence-transformers" in capsys.readouterr().err
