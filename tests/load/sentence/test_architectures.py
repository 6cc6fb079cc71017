"""Encoders of other designs embed as sentence-transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from optimizer.commands.build.initial.model import look
from optimizer.foundation.errors import CheckpointError, RecipeError
from optimizer.model.checkpoint.model import choose_auto_class
from tests.conftest import heavy_tailed, write_tokenizer
from tests.load.conftest import Load, edit_json

WIDTH = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
SIZES: dict[str, dict[str, Any]] = {
    "t5": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
    "nomic_bert": WIDTH,  # transformers splits its Wqkv
    "gte": WIDTH,
    "jina_embeddings_v3": WIDTH,
    "eurobert": {**WIDTH, "num_key_value_heads": 2},
}


@pytest.mark.parametrize("kind", SIZES)
def test_an_encoder_is_read_as_the_library_reads_it(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    from sentence_transformers import SentenceTransformer
    from transformers import AutoConfig

    rows = write_tokenizer(tmp_path)
    config = AutoConfig.for_model(kind, vocab_size=rows, pad_token_id=1, **SIZES[kind])
    model = choose_auto_class("sentence-embedding", kind).from_config(config)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.add_(heavy_tailed(tuple(parameter.shape), i, 0.1))
    model.save_pretrained(tmp_path)
    parts = [modules.Transformer(str(tmp_path), max_seq_length=24), modules.Pooling(64)]
    SentenceTransformer(modules=parts, device="cpu").save(str(tmp_path / "saved"))
    assert look(str(tmp_path / "saved"), None).task.name == "sentence-embedding"
    load(tmp_path / "saved")
    assert "texts have the vectors of sentence-transformers' encode" in capsys.readouterr().err


def test_an_encoder_decoder_is_not_cut_to_its_encoder_unasked(tmp_path: Path) -> None:
    edit_json(
        tmp_path / "config.json",
        model_type="t5",
        is_encoder_decoder=True,
        architectures=["T5ForConditionalGeneration"],
    )
    with pytest.raises(RecipeError, match="T5ForConditionalGeneration"):
        look(str(tmp_path), None)


def test_a_model_of_more_than_texts_is_refused_by_name(load: Load, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModel

    text = {**WIDTH, "vocab_size": write_tokenizer(tmp_path), "num_key_value_heads": 2}
    config = AutoConfig.for_model("embedding_gemma2", text_config=text | {"head_dim": 16})
    AutoModel.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"embedding_gemma2.*the text_config is one part"):
        load(tmp_path)
