"""Long texts cost no more than their used beginning, and give the same tokens."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from optimizer.harness.inputs import text as texts
from optimizer.harness.inputs.text import TextTokenizer
from tests.conftest import WORDS, sentences


def opened(folder: Path) -> TextTokenizer:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return TextTokenizer(tokenizer)


def prose(words: int, seed: int) -> str:
    draw = random.Random(seed)
    return "".join(draw.choice(WORDS) + draw.choice(" \n\t") for _ in range(words))


def unigram() -> TextTokenizer:
    """Unigram tokenizer like those of XLM-RoBERTa and ALBERT."""
    core = Tokenizer(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    core.train_from_iterator(sentences(400), trainer)
    return TextTokenizer(core)


def undivided() -> TextTokenizer:
    """BPE tokenizer without word boundaries, like Llama 2's."""
    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.train_from_iterator(
        sentences(400), trainers.BpeTrainer(vocab_size=200, show_progress=False)
    )
    return TextTokenizer(core)


BUILT = {"unigram": unigram, "undivided": undivided}


@pytest.fixture(scope="module", params=["tiny_bert", "tiny_llama", "minilm_source", *BUILT])
def tokenizer(request: pytest.FixtureRequest) -> TextTokenizer:
    if request.param in BUILT:
        return BUILT[request.param]()
    return opened(request.getfixturevalue(request.param))


@pytest.mark.parametrize("seed", range(5))
def test_the_head_of_a_text_has_its_first_tokens(tokenizer: TextTokenizer, seed: int) -> None:
    text = prose(40_000, seed)
    whole: Any = tokenizer.encode(text, add_special_tokens=False).ids
    for length in (8, 128, 512):
        head = tokenizer.head(text, length)
        assert len(head) < len(text) / 2
        assert tokenizer.encode(head, add_special_tokens=False).ids[:length] == whole[:length]


def test_a_text_that_begins_with_blanks_is_read_until_it_says_something(
    tokenizer: TextTokenizer,
) -> None:
    text = " " * 100_000 + prose(40_000, 1)
    head = tokenizer.head(text, 16)
    expected = tokenizer.encode(text, add_special_tokens=False).ids[:16]
    assert tokenizer.encode(head, add_special_tokens=False).ids[:16] == expected


def test_an_endless_word_is_read_to_the_bound(tokenizer: TextTokenizer) -> None:
    characters = len(tokenizer.head("x" * 1_500_000, 2**20))
    assert characters == texts.READ_AT_MOST


def test_a_short_text_is_left_as_it_is(tokenizer: TextTokenizer) -> None:
    text = prose(500, 2)
    unchanged = tokenizer.head(text, 2) is text
    assert unchanged
    assert tokenizer.ids([text]) == [tokenizer.encode(text, add_special_tokens=False).ids]


def test_pieces_of_a_long_text_hold_the_tokens_of_all_of_it(
    tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "PIECE", 1_000)
    text = "".join(line + "\n" for line in prose(4_000, 3).split("\n"))
    pieces = tokenizer.ids([text, "the good film"])
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    assert len(pieces[0]) == pytest.approx(len(whole), rel=0.02)
    assert pieces[1] == tokenizer.encode("the good film", add_special_tokens=False).ids
