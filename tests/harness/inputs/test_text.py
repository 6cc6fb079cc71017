"""Detokenized text has whole characters and exact stops, independent of token boundaries."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from optimizer.harness.errors import InputError
from optimizer.harness.generate import Options, generate, stream
from optimizer.harness.generate.text import Detokenizer, StopFilter
from tests.harness import tiny_decoder

UNUSUAL = "naïve café, 日本語 and 🎈🧑🏽‍🚀, «мир» — ok"


def streamed(tokenizer: Any, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    text = Detokenizer(tokenizer, prompt or [])
    return [*(text.add(i) for i in ids), text.flush()]


def test_a_character_comes_whole_with_its_last_token(tokenizer: Any) -> None:
    made = streamed(tokenizer, tokenizer.encode("é🎈").ids)
    assert made == ["", "é", "", "", "", "🎈", ""]


def test_unusual_text_arrives_as_it_was(tokenizer: Any) -> None:
    made = streamed(tokenizer, tokenizer.encode(UNUSUAL).ids)
    assert "".join(made) == UNUSUAL
    assert not any("�" in piece for piece in made)


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(3, 319), max_size=40), cut=st.integers(0, 40))
def test_any_bytes_give_the_decoders_text(tokenizer: Any, ids: list[int], cut: int) -> None:
    prompt = tokenizer.encode("good").ids
    assert "".join(streamed(tokenizer, ids, prompt)) == tokenizer.decode(ids)


def test_half_a_character_at_the_end_is_shown_as_broken(tokenizer: Any) -> None:
    ids = tokenizer.encode("a🎈").ids[:-1]
    assert streamed(tokenizer, ids) == ["a", "", "", "", "�"]


def test_special_tokens_print_nothing(tokenizer: Any) -> None:
    ids = [*tokenizer.encode("a").ids, 1, *tokenizer.encode(" b").ids]
    assert "".join(streamed(tokenizer, ids)) == "a b"


def sentencepiece() -> Any:
    """Tokenizer with marked spaces and byte tokens, like Llama 2's."""
    pieces = ["<unk>", "<s>", "▁a", "b", "▁", *(f"<0x{i:02X}>" for i in range(256))]
    made = Tokenizer(models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True))
    made.add_special_tokens(["<s>"])
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return made


def test_the_space_before_the_first_word_of_an_answer_is_kept() -> None:
    assert streamed(sentencepiece(), [2, 3, 2], prompt=[1, 2]) == [" a", "b", " a", ""]
    assert streamed(sentencepiece(), [2, 3, 1, 2]) == ["a", "b", "", " a", ""]


def test_bytes_of_a_sentencepiece_tokenizer_become_characters() -> None:
    bytes_ = [5 + b for b in "é".encode()]
    assert streamed(sentencepiece(), [*bytes_, 2]) == ["", "é", " a", ""]


def cut(text: list[str], *stops: str) -> tuple[str, str | None]:
    chosen = StopFilter(stops)
    made = "".join(chosen.add(piece) for piece in text)
    return made + chosen.flush(), chosen.matched


@pytest.mark.parametrize(
    ("text", "stops", "wanted"),
    [
        ("one two three", ["two"], ("one ", "two")),
        ("aab", ["ab"], ("a", "ab")),
        ("one two", ["three"], ("one two", None)),
        ("one END", ["ENDS"], ("one END", None)),
        ("xabcd", ["abcd", "bc"], ("xa", "bc")),  # bc is complete first
        ("xabc", ["c", "bc"], ("xa", "bc")),  # both end there: the longer
        ("stop", ["stop"], ("", "stop")),
    ],
)
def test_the_text_ends_before_the_stop_string_however_it_is_cut(
    text: str, stops: list[str], wanted: tuple[str, str | None]
) -> None:
    assert cut([text], *stops) == wanted
    assert cut(list(text), *stops) == wanted
    for i in range(len(text)):
        assert cut([text[:i], text[i:]], *stops) == wanted


@settings(max_examples=100, deadline=None)
@given(
    text=st.text("ab", max_size=20),
    cuts=st.lists(st.integers(0, 20), max_size=5),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_how_the_text_is_cut_never_matters(text: str, cuts: list[int], stops: list[str]) -> None:
    ends = [0, *sorted(cuts), len(text)]
    parts = [text[a:b] for a, b in pairwise(ends)]
    assert cut(parts, *stops) == cut([text], *stops)


def test_nothing_of_a_stop_string_is_streamed(contract: Any, tokenizer: Any) -> None:
    ids = tokenizer.encode("good STOP now").ids
    script = tiny_decoder.ScriptRunner(ids, tokenizer.get_vocab_size())
    options = Options(stop=("STOP",))
    found = list(stream(contract, script, tokenizer, ["the"], options))
    assert "".join(p.text for p in found) == "good "
    assert (found[-1].finish, found[-1].stop) == ("stop", "STOP")
    assert len(found) < len(ids)


def test_a_special_token_can_be_a_stop_string(contract: Any, tokenizer: Any) -> None:
    word = tokenizer.encode("good").ids
    script = tiny_decoder.ScriptRunner([*word, 1, *word], tokenizer.get_vocab_size())
    options = Options(stop=("<|im_start|>",))
    (made,) = generate(contract, script, tokenizer, ["the"], options)
    assert (made.text, made.finish, made.stop) == ("good", "stop", "<|im_start|>")


def test_a_stop_string_that_could_never_be_found_is_refused(contract: Any, tokenizer: Any) -> None:
    script = tiny_decoder.ScriptRunner([2], tokenizer.get_vocab_size())
    options = Options(stop=("<|im_start|>good",))
    with pytest.raises(InputError, match="which prints nothing"):
        generate(contract, script, tokenizer, ["the"], options)


def test_what_is_held_back_comes_out_when_the_text_ends(contract: Any, tokenizer: Any) -> None:
    ids = [*tokenizer.encode("good EN").ids, 2]
    script = tiny_decoder.ScriptRunner(ids, tokenizer.get_vocab_size())
    (made,) = generate(contract, script, tokenizer, ["the"], Options(stop=("END",)))
    assert (made.text, made.finish) == ("good EN", "eos")
