"""A tokenizer that was made up, or belongs to another model, is refused by its cause."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.load.conftest import Load, edit_json
from tests.load.test_bad_checkpoint import refused

SPECIAL = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}


@pytest.fixture(scope="session")
def tiny_albert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random ALBERT whose vocabulary is in vocab.txt, which ALBERT's tokenizer does not read."""
    from transformers import AlbertConfig, AlbertModel

    folder = tmp_path_factory.mktemp("albert")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "c", "1", "o", "=", "(", ")"]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    config = AlbertConfig(
        vocab_size=len(words),
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    AlbertModel(config).save_pretrained(folder)
    return folder


def test_a_vocabulary_that_the_chosen_class_does_not_read_is_named(
    load: Load, tiny_albert: Path
) -> None:
    refused(load, tiny_albert, "vocab.txt", "AlbertTokenizer", "spiece.model", "made up", "5 entr")


def test_the_class_that_reads_the_vocabulary_loads_it(
    load: Load, tiny_albert: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_albert, tmp_path / "albert"))
    edit_json(folder / "tokenizer_config.json", tokenizer_class="BertTokenizer", **SPECIAL)
    load(folder)


def test_a_tokenizer_of_special_tokens_alone_is_refused(
    load: Load, tiny_albert: Path, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    folder = Path(shutil.copytree(tiny_albert, tmp_path / "albert"))
    AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    (folder / "vocab.txt").unlink()
    refused(load, folder, "all are special tokens", "[CLS]", "finds no vocabulary")


def test_a_vocabulary_of_another_model_beside_tokenizer_json_is_refused(
    load: Load, bert: Path
) -> None:
    lines = (bert / "vocab.txt").read_text().split("\n")
    (bert / "vocab.txt").write_text("\n".join(["first", *lines]))
    refused(load, bert, "vocab.txt", "another vocabulary", "'first' (0 here, absent there)")


def test_a_stale_token_beside_tokenizer_json_is_printed(
    load: Load, bert: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (bert / "vocab.txt").read_text()
    (bert / "vocab.txt").write_text(text.replace("\nmovie\n", "\nfilmed\n"))
    load(bert)
    assert "'filmed'" in capsys.readouterr().err


def test_an_id_that_only_the_post_processor_gives_is_held_to_the_embedding(
    load: Load, bert: Path
) -> None:
    file = bert / "tokenizer.json"
    document = json.loads(file.read_text())
    processor = document["post_processor"]
    assert processor["type"] == "TemplateProcessing"
    processor["special_tokens"]["[CLS]"]["ids"] = [9999]
    file.write_text(json.dumps(document))
    edit_json(bert / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    refused(load, bert, "gives id 9999", "the embedding has")
