"""The bound is exact, the threshold is the least, and too few examples are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import beta, binom

from optimizer.harness.errors import InputError
from optimizer.harness.server.caches import pairs
from optimizer.harness.server.caches.false_hits import (
    ChosenThreshold,
    FalseHitLimit,
    QuestionPair,
    Vectors,
    choose_threshold,
    min_questions,
    upper_bound,
)

TERMS = FalseHitLimit(0.1, 0.9)
ENTRY = "what is kept"


def at(similarity: float) -> Vectors:
    """A vector that is so alike to the entry's."""
    return np.array([similarity, math.sqrt(1 - similarity**2)], np.float32)


def asked(similarities: list[float]) -> tuple[list[QuestionPair], dict[str, Vectors]]:
    """As many questions, none of them the entry's."""
    some = [QuestionPair(i, f"question {i}", ENTRY, False) for i in range(len(similarities))]
    vectors = {p.text: at(s) for p, s in zip(some, similarities, strict=True)}
    return some, {**vectors, ENTRY: at(1.0)}


def test_the_bound_is_clopper_and_pearsons() -> None:
    for examples in (1, 20, 300, 5000):
        for count in {0, 1, examples // 3, examples - 1, examples}:
            for confidence in (0.5, 0.95, 0.999):
                exact = 1.0
                if count < examples:
                    exact = beta.ppf(confidence, count + 1, examples - count)
                assert upper_bound(count, examples, confidence) == pytest.approx(exact, rel=1e-9)


def test_so_many_questions_are_needed_and_no_fewer() -> None:
    for terms in (TERMS, FalseHitLimit(0.01, 0.95), FalseHitLimit(0.5, 0.99)):
        least = min_questions(terms)
        assert upper_bound(0, least, terms.confidence) <= terms.rate
        assert upper_bound(0, least - 1, terms.confidence) > terms.rate


def test_too_few_questions_are_refused_with_how_many_are_needed() -> None:
    least = min_questions(TERMS)
    with pytest.raises(InputError, match=f"{least} or more"):
        choose_threshold(*asked([0.5] * (least - 1)), TERMS)
    assert choose_threshold(*asked([0.5] * least), TERMS).false_hits == 0


def test_a_rate_that_is_too_high_is_rarely_taken_for_a_low_one() -> None:
    """The law: similarities are uniform, so that the true rate at a threshold is 1 - threshold."""
    chance, runs = np.random.default_rng(0), 100
    wrong = 0
    for _ in range(runs):
        found = choose_threshold(*asked(list(chance.random(60))), TERMS)
        wrong += 1 - found.threshold > TERMS.rate
    most = binom.ppf(0.999, runs, 1 - TERMS.confidence)
    assert 0 < wrong <= most


def test_the_threshold_is_the_least_one() -> None:
    chance = np.random.default_rng(1)
    similarities = sorted(chance.random(200), reverse=True)
    found = choose_threshold(*asked(similarities), TERMS)
    lower = next(s for s in similarities if s < found.threshold)
    assert found.threshold == pytest.approx(lower, abs=1e-5)
    more = sum(s >= lower for s in similarities)
    assert found.false_hits == more - 1
    assert found.bound == upper_bound(found.false_hits, 200, TERMS.confidence) <= TERMS.rate
    assert upper_bound(more, 200, TERMS.confidence) > TERMS.rate


def known(*labelled: tuple[str, str, bool]) -> ChosenThreshold:
    """With thirty questions that are like nothing, beside these, whose texts are alike by their
    numbers."""
    some, vectors = asked([-1.0] * 30)
    some += [QuestionPair(100 + i, *pair) for i, pair in enumerate(labelled)]
    for text in {t for a, b, _ in labelled for t in (a, b)}:
        vectors[text] = at(float(text.split()[-1]))
    return choose_threshold(some, vectors, TERMS)


def test_what_several_pairs_say_together_is_the_same() -> None:
    """Questions with one answer are not independent examples, and not false hits."""
    linked = known(("a 0.8", "b 0.9", True), ("c 0.9", "b 0.9", True), ("c 0.9", "d 0.9", True))
    assert (linked.questions, linked.same, linked.hits) == (31, 1, 1)
    assert linked.threshold == pytest.approx(0.8, abs=1e-5)  # of a and what was kept before


def test_two_texts_that_no_pair_compares_count_as_different() -> None:
    apart = known(("a 0.5", "b 0.5", True), ("c 0.6", "d 0.6", True))
    assert apart.threshold > at(0.5) @ at(0.6) > 0.9
    joined = known(("a 0.5", "b 0.5", True), ("c 0.6", "d 0.6", True), ("a 0.5", "d 0.6", True))
    assert joined.threshold < 0.61


def test_a_question_is_compared_with_all_that_is_kept_but_its_own_answer() -> None:
    assert known(("a 0.3", "b 0.4", True), ("c 0.5", "d 0.6", True)).entries == 2
    assert known(("a 0.3", "b 0.4", True), ("c 0.5", "d 0.6", False)).entries == 2
    assert known(("a 0.3", "b 0.4", False), ("c 0.5", "d 0.6", False)).entries == 3


def test_pairs_that_contradict_each_other_are_refused_by_their_line() -> None:
    with pytest.raises(InputError, match="line 102"):
        known(("a 0.9", "b 0.9", True), ("b 0.9", "c 0.9", True), ("a 0.9", "c 0.9", False))


def test_an_encoder_that_cannot_tell_questions_apart_is_refused_with_their_lines() -> None:
    with pytest.raises(InputError, match=r"does not distinguish .* lines 0 and 0"):
        choose_threshold(*asked([1.0] * 60), TERMS)


@pytest.mark.parametrize(
    "line",
    ['{"text": "a"}', "[1]", "no", '{"text": "a", "text_pair": "", "same": true}', "{" * 9999],
)
def test_a_line_that_is_no_pair_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "pairs.jsonl"
    right = {"text": "a", "text_pair": "b", "same": True}
    file.write_text(f"{json.dumps(right)}\n\n{line}\n")
    with pytest.raises(InputError, match="line 3"):
        pairs.read(file)
    file.write_text(json.dumps(right))
    assert pairs.read(file) == [QuestionPair(1, "a", "b", True)]


def test_same_is_true_or_false(tmp_path: Path) -> None:
    value: Any
    for value in (1, "true", None):
        file = tmp_path / "pairs.jsonl"
        file.write_text(json.dumps({"text": "a", "text_pair": "b", "same": value}))
        with pytest.raises(InputError, match="'same' is not true or false"):
            pairs.read(file)
