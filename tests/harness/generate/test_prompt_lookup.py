"""Prompt lookup saves steps and never changes the text."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimizer.harness.bundle.bundle import Bundle
from optimizer.harness.errors import InputError, MachineError
from optimizer.harness.generate import Options
from optimizer.harness.generate import prompt_lookup as lookup
from optimizer.harness.runtimes.ort.slots import OrtSlots
from tests.package.bundles import generation_bundle

GREEDY = Options(max_new_tokens=40, do_sample=False, ignore_eos=True)
DRAWN = Options(max_new_tokens=40, do_sample=True, temperature=0.7, seed=3, ignore_eos=True)
PROMPTS = ["good", "a good film a good film a good", "the worst film of all, the worst film"]


def in_circles(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A model that counts to seven in a loop, and the tokens of every step."""
    sizes, scores = list[int](), OrtSlots.scores

    def count(self: OrtSlots, text: int, ids: Sequence[int]) -> Any:
        sizes.append(len(ids))
        given = scores(self, text, ids)
        given[np.arange(len(ids)), [3 + (i + 1) % 7 for i in ids]] += 1e4
        return given

    monkeypatch.setattr(OrtSlots, "scores", count)
    return sizes


@pytest.mark.parametrize("options", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_text_is_the_same_however_many_tokens_are_guessed(
    decoder_bundle: Path, options: Options
) -> None:
    texts = []
    for guesses in (1, 3, 7, 15):
        with Bundle(decoder_bundle, prompt_lookup=guesses) as bundle:
            texts.append([c.tokens for c in bundle.generate(PROMPTS, options)])
    assert all(t == texts[0] for t in texts)
    assert [len(t) for t in texts[0]] == [40] * 3


def test_a_text_is_that_without_guesses_where_kernels_give_a_row_the_same_bits(
    decoder_bundle: Path,
) -> None:
    with Bundle(decoder_bundle) as bundle:
        plain = bundle.generate(PROMPTS, GREEDY)
    with Bundle(decoder_bundle, prompt_lookup=3) as bundle:
        assert bundle.generate(PROMPTS, GREEDY) == plain


def test_a_text_that_repeats_itself_takes_fewer_steps_than_tokens(
    decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Bundle(decoder_bundle, prompt_lookup=3) as bundle:
        sizes = in_circles(monkeypatch)
        (text,) = bundle.generate(["good"], GREEDY)
    assert len(sizes) < 0.8 * len(text.tokens)  # its first seven tokens are new
    assert set(sizes[1:]) <= {2, 4}


def test_a_text_ends_in_the_middle_of_a_step(decoder_bundle: Path) -> None:
    with Bundle(decoder_bundle, prompt_lookup=7) as bundle:
        whole = bundle.generate(["good"], GREEDY)[0].tokens
        for length in range(1, 24):
            options = Options(max_new_tokens=length, do_sample=False, ignore_eos=True)
            (text,) = bundle.generate(["good"], options)
            assert text.tokens == whole[:length]
            assert text.finish == "length"


def test_a_text_fills_the_context_to_its_last_token(decoder_bundle: Path) -> None:
    options = Options(max_new_tokens=1000, do_sample=False, ignore_eos=True)
    with Bundle(decoder_bundle) as bundle:
        (plain,) = bundle.generate(["good"], options)
        context = bundle.contract.decoder.context
    with Bundle(decoder_bundle, prompt_lookup=15) as bundle:
        (text,) = bundle.generate(["good"], options)
    assert text == plain
    assert text.prompt_tokens + len(text.tokens) == context


def test_kernels_whose_scores_depend_on_the_tokens_of_a_step_are_refused(
    decoder_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = OrtSlots.scores

    def uneven(self: OrtSlots, text: int, ids: Sequence[int]) -> Any:
        return scores(self, text, ids) + np.float32(1e-6 * (len(ids) == 4))

    monkeypatch.setattr(OrtSlots, "scores", uneven)
    Bundle(decoder_bundle, prompt_lookup=1).close()  # no step has four
    with pytest.raises(MachineError, match="prompt lookup of 3 tokens"):
        Bundle(decoder_bundle, prompt_lookup=3)


def test_a_cache_that_is_no_buffer_cannot_take_guesses_back(tmp_path: Path) -> None:
    bundle = generation_bundle.make(tmp_path, "new")
    with pytest.raises(MachineError, match="prompt lookup"):
        Bundle(bundle, prompt_lookup=3)


def test_a_model_that_continues_no_text_is_told_so(made: Path) -> None:
    with pytest.raises(InputError, match="text-generation"):
        Bundle(made, prompt_lookup=3)


def test_a_wrong_guess_leaves_nothing_behind(decoder_bundle: Path) -> None:
    """Undone tokens leave no trace in the scores."""
    with Bundle(decoder_bundle) as bundle:
        made = partial(bundle.runner.slots, bundle.contract, 1)
        ids = [5, 9, 12, 7, 30, 31, 8, 4]
        clean, used = made(32), made(32)
        for slots in (clean, used):
            slots.open(0)
            slots.read(0, ids[:4])
        used.scores(0, [1, 2, 3, 6])
        used.undo(0, 4)
        np.testing.assert_array_equal(used.scores(0, ids[4:]), clean.scores(0, ids[4:]))


class TestSeen:
    def test_what_followed_the_newest_tokens_last_is_guessed(self) -> None:
        seen = lookup.SeenTokens([1, 2, 3, 4, 5, 9, 1, 2, 3, 7, 8, 6, 1, 2, 3])
        assert seen.match_length() == 3
        assert seen.guess(3, 4) == [7, 8, 6, 1]

    def test_a_longer_run_is_found_before_a_shorter_one(self) -> None:
        seen = lookup.SeenTokens([1, 2, 3, 4, 8, 2, 3, 5, 1, 2, 3])
        assert (seen.match_length(), seen.guess(3, 1)) == (3, [4])
        seen = lookup.SeenTokens([8, 2, 3, 5, 1, 2, 3])
        assert (seen.match_length(), seen.guess(2, 1)) == (2, [5])
        assert lookup.SeenTokens([8, 3, 5, 1, 2, 3]).match_length() == 1

    def test_beyond_the_newest_token_a_period_goes_on(self) -> None:
        assert lookup.SeenTokens([1, 2, 7, 1, 2, 7, 1, 2]).guess(2, 5) == [7, 1, 2, 7, 1]

    def test_tokens_that_never_stood_before_are_not_known(self) -> None:
        assert lookup.SeenTokens([1, 2, 3]).match_length() == 0
        assert lookup.SeenTokens([4]).match_length() == 0


CHEAP = {2: 1.0, 4: 1.1, 8: 1.3}  # as where a row more costs little
DEAR = {2: 1.0, 4: 1.7, 8: 3.0}
CIRCLE = [1, 2, 3, 1, 2, 3, 1, 2]


class TestGuesses:
    @pytest.mark.parametrize("room", range(1, 9))
    def test_a_step_has_an_even_number_of_tokens_that_fit(self, room: int) -> None:
        step = lookup.Guesses(CIRCLE, CHEAP).step(room)
        assert len(step) % 2 == 0
        assert len(step) <= room + 1
        assert step[0] == 2

    def test_more_are_guessed_where_rows_cost_little_or_guesses_were_right(self) -> None:
        cheap, dear = (lookup.Guesses(CIRCLE, seconds) for seconds in (CHEAP, DEAR))
        assert len(dear.step(99)) == 2 < len(cheap.step(99))
        for _ in range(30):
            step = dear.step(99)
            dear.update(step, [*step[1:], step[-1] % 3 + 1])
        assert len(dear.step(99)) == 8

    def test_fewer_are_guessed_after_wrong_ones_and_they_are_counted(self) -> None:
        guesses = lookup.Guesses(CIRCLE, CHEAP)
        first = guesses.step(99)
        guesses.update(first, [3, 9])  # one was right
        assert (guesses.guessed, guesses.right) == (len(first) - 1, 1)
        for _ in range(30):
            step = guesses.step(99)
            guesses.update(step, [4])
        assert len(guesses.step(99)) == 2

    def test_a_token_that_is_guessed_without_a_reason_counts_as_none(self) -> None:
        guesses = lookup.Guesses([1, 2, 3], CHEAP)
        step = guesses.step(99)
        assert len(step) == 2
        guesses.update(step, [4])
        assert (guesses.guessed, guesses.right) == (0, 0)
