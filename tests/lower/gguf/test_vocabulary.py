"""tokenizer.json in llama.cpp's keys, and refusals of tokenizers outside its table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors

from optimizer.foundation.errors import RecipeError
from optimizer.lower.gguf import vocabulary
from tests.decoders import write_decoder_tokenizer

P = pre_tokenizers
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")


def split(regex: str) -> Any:
    """As the tokenizers of Llama 3 and Qwen are published."""
    return P.Sequence(
        [P.Split(Regex(regex), "isolated"), P.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def document(pre: Any, **model: Any) -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre
    made: dict[str, Any] = json.loads(tokenizer.to_str())
    made["model"] |= model
    return made


PLAIN = P.ByteLevel(add_prefix_space=False)
DIGITS = P.Sequence([P.Digits(individual_digits=True), PLAIN])


@pytest.mark.parametrize(
    ("pre", "whole_words", "name"),
    [
        (PLAIN, False, "gpt-2"),
        (DIGITS, False, "smollm"),
        (split(QWEN2), False, "qwen2"),
        (split(LLAMA3), True, "llama-bpe"),
        (split(LLAMA3), False, "smaug-bpe"),
    ],
)
def test_a_split_that_llama_cpp_has_is_named(pre: Any, whole_words: bool, name: str) -> None:
    made = document(pre, ignore_merges=whole_words)
    assert vocabulary.find_pre_tokenizer(made).name == name


@pytest.mark.parametrize(
    "pre",
    [
        P.ByteLevel(add_prefix_space=True),
        P.Sequence([P.Digits(individual_digits=False), PLAIN]),
        P.Whitespace(),
        split(LLAMA3 + "|x"),
        P.Sequence([P.Split(Regex(LLAMA3), "removed"), P.ByteLevel(add_prefix_space=False)]),
    ],
)
def test_another_split_is_refused_with_those_that_are_known(pre: Any) -> None:
    with pytest.raises(RecipeError, match=r"gpt-2, smollm, qwen2, llama-bpe, smaug-bpe"):
        vocabulary.find_pre_tokenizer(document(pre))


@pytest.mark.parametrize("model", [{"byte_fallback": True}, {"ignore_merges": True}])
def test_merges_that_work_otherwise_are_refused(model: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="is not in the table of llama"):
        vocabulary.find_pre_tokenizer(document(PLAIN, **model))


def test_a_normalizer_is_refused_but_for_nfc() -> None:
    made = document(PLAIN)
    vocabulary.find_pre_tokenizer({**made, "normalizer": {"type": "NFC"}})
    with pytest.raises(RecipeError, match="normalizer Lowercase"):
        vocabulary.find_pre_tokenizer({**made, "normalizer": {"type": "Lowercase"}})


def test_every_row_of_the_models_table_has_a_token(tmp_path: Path) -> None:
    size = write_decoder_tokenizer(tmp_path)
    words = vocabulary.read(tmp_path, size + 2)
    assert words.tokens[-2:] == [f"[PAD{size}]", f"[PAD{size + 1}]"]
    assert words.types[:3] + words.types[-1:] == [3, 3, 3, 5]  # control, unused
    assert set(words.types[3:size]) == {1}
    assert words.special.special_token_ids["eos"] == 2
    assert "im_start" in str(words.special.chat_template)


def test_more_tokens_than_rows_are_refused(tmp_path: Path) -> None:
    size = write_decoder_tokenizer(tmp_path)
    with pytest.raises(RecipeError, match=f"has no row in the model's table of {size - 1}"):
        vocabulary.read(tmp_path, size - 1)


def add(folder: Path, single: str) -> None:
    """Let the tokenizer put special tokens around a text."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pieces = [("<|endoftext|>", 0), ("<|im_start|>", 1), ("<|im_end|>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=pieces)
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    ("single", "adds"),
    [
        ("$A", {"bos": False, "eos": False}),
        ("<|endoftext|> $A", {"bos": True, "eos": False}),
        ("<|endoftext|> $A <|im_end|>", {"bos": True, "eos": True}),
    ],
)
def test_whether_bos_and_eos_are_added_is_said(
    single: str, adds: dict[str, bool], tmp_path: Path
) -> None:
    size = write_decoder_tokenizer(tmp_path)
    add(tmp_path, single)
    assert vocabulary.read(tmp_path, size).special.add_special_token == adds


def test_other_tokens_around_a_text_are_refused(tmp_path: Path) -> None:
    size = write_decoder_tokenizer(tmp_path)
    add(tmp_path, "<|im_start|> $A")
    with pytest.raises(RecipeError, match=r"adds \[1\] to a text"):
        vocabulary.read(tmp_path, size)
