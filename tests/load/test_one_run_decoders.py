"""Decoders that classify, rank or embed run once over a text and answer as their library does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from optimizer.commands.build.initial.model import look
from optimizer.export.padding import check_padding
from optimizer.foundation.errors import CheckpointError
from optimizer.harness import contract as contracts
from optimizer.harness import tasks
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.harness.runtimes.ort.run import OrtRunner
from optimizer.load.config.modules_json import locate_config
from optimizer.load.sentence.keys import TEXT_ONLY
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model
from tests.conftest import sentences
from tests.decoders import write_tiny_decoder
from tests.export.folders import exported
from tests.load.conftest import Load, edit_json

TASK, PAD = "text-classification", 1
TEXTS = [*sentences(3, seed=1), "good"]
BOTH = {"use_bidirectional_attention": True, "sliding_window": 8}


def write_classifier(folder: Path, kind: str, **fields: Any) -> Path:
    fields = {"pad_token_id": PAD, "num_labels": 3, **fields}
    return write_tiny_decoder(folder, kind, task=TASK, **fields)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_classifier(tmp_path_factory.mktemp("classifier") / "gpt2", "gpt2")


@pytest.mark.parametrize("kind", ["gpt2", "qwen3", "gemma3_text"])
def test_a_batch_has_the_logits_of_single_texts(load: Load, tmp_path: Path, kind: str) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    fields = BOTH if kind == "gemma3_text" else {}
    folder = write_classifier(tmp_path / kind, kind, **fields)
    theirs = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    out = load(folder, TASK)
    contract = contracts.read(out / "contract.json")
    batch = tasks.encode(contract, load_tokenizer(out / "checkpoint", contract), TEXTS)
    with torch.no_grad():
        model = load_torch_model(open_checkpoint(out), TASK)
        logits = model(**{n: torch.from_numpy(a) for n, a in batch.items()}).logits
        each = [theirs(**tokenizer(text, return_tensors="pt")).logits for text in TEXTS]
    np.testing.assert_allclose(logits, torch.cat(each), rtol=1e-4, atol=1e-4)
    assert logits.std(0).min() > 0.01


def test_the_graph_finds_the_last_token_in_front_of_padding(gpt2: Path, load: Load) -> None:
    out = load(gpt2, TASK, max_length=24)
    graph = exported(out, out.with_name("graph")).graph  # its checks compare rows alone and padded
    contract = contracts.read(out / "contract.json")
    batch = tasks.encode(contract, load_tokenizer(out / "checkpoint", contract), TEXTS)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    wrong = {"input_ids": np.where(mask == 1, ids, PAD + 1), "attention_mask": mask}
    with (
        OrtRunner(graph / "model.onnx", device="cpu") as runner,
        pytest.raises(CheckpointError, match="when padding is removed"),
    ):
        check_padding(runner, wrong, None, {"logits": 1e-3}, {"logits": 0.0})


@pytest.mark.parametrize("pad", [None, -1])
def test_a_classifier_without_padding_reads_no_batch(
    load: Load, tmp_path: Path, pad: int | None
) -> None:
    folder = write_classifier(tmp_path / "llama", "llama")
    edit_json(folder / "config.json", pad_token_id=pad)
    with pytest.raises(CheckpointError, match=r"one text at a time.*Set it to"):
        load(folder, TASK)


def set_padding(folder: Path, side: str) -> Path:
    edit_json(folder / "tokenizer_config.json", pad_token="<|im_start|>", padding_side=side)
    return folder


def test_a_decoder_of_one_label_ranks_as_the_cross_encoder_does(
    load: Load, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sentence_transformers")
    folder = write_classifier(tmp_path / "gpt2", "gpt2", num_labels=1)
    set_padding(folder, "left")
    with pytest.raises(CheckpointError, match=r"chat template.*remove chat_template\.jinja"):
        load(folder, "text-ranking")
    (folder / "chat_template.jinja").unlink()
    load(folder, "text-ranking")
    assert "pairs have the scores of sentence-transformers' CrossEncoder" in capsys.readouterr().err


def write_embedder(folder: Path, kind: str, pooling: str, **fields: Any) -> Path:
    """A folder as SentenceTransformer saves it, with a tokenizer that pads on the left."""
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    from sentence_transformers import SentenceTransformer

    base = write_tiny_decoder(folder / "base", kind, task="feature-extraction", **fields)
    plain = {"modality_config": {"text": dict(TEXT_ONLY["text"])}}
    transformer = modules.Transformer(
        str(set_padding(base, "left")), module_output_name="token_embeddings", **plain
    )
    parts = [transformer, modules.Pooling(64, pooling_mode=pooling), modules.Normalize()]
    prompts = {"query": "this is good : ", "document": ""}
    SentenceTransformer(modules=parts, device="cpu", prompts=prompts).save(str(folder / "saved"))
    return set_padding(folder / "saved", "left")


@pytest.mark.parametrize(
    ("kind", "pooling", "fields"),
    [("qwen3", "lasttoken", {}), ("gpt2", "mean", {}), ("gemma3_text", "mean", BOTH)],
)
def test_a_decoder_embeds_as_sentence_transformers_does(
    load: Load,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    pooling: str,
    fields: dict[str, Any],
) -> None:
    folder = write_embedder(tmp_path, kind, pooling, **fields)
    assert look(str(folder), None).task.name == "sentence-embedding"
    load(folder)
    assert "texts have the vectors of sentence-transformers' encode" in capsys.readouterr().err


def test_texts_that_the_library_renders_as_messages_are_refused(load: Load, tmp_path: Path) -> None:
    folder = write_embedder(tmp_path, "llama", "lasttoken")
    file = locate_config(folder)
    edit_json(file, modality_config=None, module_output_name=None)
    with pytest.raises(CheckpointError, match=r"chat template.*token_embeddings.*to this file"):
        load(folder)
