"""Answers are compared with chance, and implausible ones are refused."""

from __future__ import annotations

import numpy as np
import pytest

from optimizer.data.datasets import Sample
from optimizer.data.image_truth.objects import Labelled
from optimizer.foundation.errors import DataError
from optimizer.harness import tasks
from optimizer.harness.tasks.images.object_detection import Objects
from optimizer.validate import sense
from optimizer.validate.gates import Gate
from optimizer.validate.quality import chance, quality
from optimizer.validate.quality.images import detection
from optimizer.validate.quality.quality import Answers

NAMES = ("a", "b", "c", "d", "e", "f")
RNG = np.random.default_rng(0)


def noisy(truth: np.ndarray, right: float, labels: int) -> np.ndarray:
    """The labels, of which about 1 - right are replaced by random ones."""
    other = RNG.integers(0, labels, len(truth))
    return np.where(RNG.random(len(truth)) < right, truth, other)


def labelled(truth: np.ndarray, answers: np.ndarray, labels: int) -> sense.Labelled:
    return list(truth[:, None]), list(answers[:, None]), labels


def judged(
    truth: np.ndarray, answers: np.ndarray, labels: int, confidence: float = 0.95
) -> dict[str, object]:
    return sense.compare_with_chance(
        "accuracy", labelled(truth, answers, labels), None, NAMES, confidence
    )


def test_answers_that_know_nothing_pass_for_more_at_the_declared_rate() -> None:
    runs = 200
    above = 0
    for _ in range(runs):
        truth = RNG.integers(0, 2, 40)
        found = chance.matches(truth, RNG.integers(0, 2, 40))
        above += chance.compare_with_chance(found, 0.9).above
    assert above <= 0.1 * runs + 3 * (0.1 * 0.9 * runs) ** 0.5


def test_two_labels_of_chance_are_fishers_exact_test() -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy judges the p-value")
    truth, answers = np.arange(40) % 2, np.arange(40) % 2
    answers[:14] ^= 1
    table = [[((truth == i) & (answers == j)).sum() for j in (0, 1)] for i in (0, 1)]
    expected = stats.fisher_exact(table, alternative="greater").pvalue
    found = chance.compare_with_chance(chance.matches(truth, answers), 0.99)
    assert found.p == pytest.approx(expected, rel=0.2)


def test_a_good_model_of_rare_labels_is_above_chance() -> None:
    truth = (np.arange(400) % 20 == 0).astype(int)
    answers = truth | (np.arange(400) % 9 == 0)  # finds them all, and twice their number of others
    found = judged(truth, answers, 2)
    assert found["verdict"] == "above chance"
    assert "commonest label alone" in str(found["warnings"])


@pytest.mark.parametrize("labels", [2, 5])
def test_exchanged_labels_are_named(labels: int) -> None:
    truth = RNG.integers(0, labels, 300)
    answers = (noisy(truth, 0.8, labels) + 1) % labels
    with pytest.raises(DataError, match="Are the labels swapped") as caught:
        judged(truth, answers, labels)
    assert "b as a" in str(caught.value)
    assert caught.value.exit_code == 2


def test_random_answers_are_refused_and_no_labels_are_called_swapped() -> None:
    refused = hinted = 0
    for _ in range(20):
        try:
            judged(RNG.integers(0, 5, 100), RNG.integers(0, 5, 100), 5)
        except DataError as e:
            refused += 1
            hinted += "swapped" in str(e)
    assert refused >= 16
    assert hinted <= 4


def test_two_swapped_labels_of_six_are_warned_of() -> None:
    truth = RNG.integers(0, 6, 300)
    answers = noisy(truth, 0.9, 6)
    swapped = np.array([0, 2, 1, 3, 4, 5])[answers]
    assert judged(truth, answers, 6)["warnings"] == []
    assert "b as c, c as b" in str(judged(truth, swapped, 6)["warnings"])


def test_a_few_rows_are_undecided_unless_they_are_swapped() -> None:
    truth = np.arange(12) % 2
    unclear = truth ^ (np.arange(12) % 4 < 2)
    assert judged(truth, unclear, 2)["verdict"] == "too few rows to tell"
    with pytest.raises(DataError, match="swapped"):
        judged(truth, 1 - truth, 2)


def test_rows_of_one_label_tell_nothing() -> None:
    ones = np.ones(100, int)
    assert judged(ones, ones, 2)["verdict"] == "too few rows to tell"


def test_one_answer_to_every_text_is_named() -> None:
    with pytest.raises(DataError, match="It answers c to every text"):
        judged(np.arange(60) % 3, np.full(60, 2), 3)


def test_words_of_one_text_are_not_independent_evidence() -> None:
    tags = [np.full(50, i % 2) for i in range(6)]
    answers = [np.full(50, i % 2) for i in (0, 1, 0, 1, 0, 0)]
    assert not chance.compare_with_chance(chance.agree_on_words(tags, answers), 0.99).above
    many = [RNG.integers(0, 3, 20) for _ in range(60)]
    guessed = [noisy(t, 0.2, 3) for t in many]
    assert chance.compare_with_chance(chance.agree_on_words(many, guessed), 0.99).above


def similarity(values: np.ndarray) -> Answers:
    angles = np.arccos(values)
    first = np.tile([1.0, 0.0], (len(values), 1))
    return Answers(tuple(first), tuple(np.stack([np.cos(angles), np.sin(angles)], 1)))


@pytest.mark.parametrize(
    ("sign", "words"), [(-1, "distances where similarities"), (0, "no better than chance")]
)
def test_scores_that_are_distances_are_refused_as_such(sign: int, words: str) -> None:
    scores = RNG.random(80)
    values = (sign * scores + RNG.random(80)) / 2
    rows = [Sample(f"t{i}", "p", score=float(s)) for i, s in enumerate(scores)]
    found = sense.measure_agreement("spearman", rows, similarity(values))
    with pytest.raises(DataError, match=words):
        sense.compare_with_chance("spearman", None, found, None, 0.99)


def test_the_nearest_text_knows_the_label_or_not() -> None:
    labels = RNG.integers(0, 2, 80)
    rows = [Sample(f"t{i}", label=int(k)) for i, k in enumerate(labels)]
    random = RNG.standard_normal((80, 8))
    known = random + 3 * labels[:, None]
    for vectors, above in ((known, True), (random, False)):
        found = sense.measure_agreement("retrieval", rows, Answers(tuple(vectors)))
        assert found is not None
        assert chance.compare_with_chance(found, 0.99).above == above


@pytest.mark.parametrize("size", [1, 2, 7, 30])
def test_an_assignment_is_scipys(size: int) -> None:
    optimize = pytest.importorskip("scipy.optimize", reason="scipy judges the assignment")
    cost = RNG.integers(0, 9, (size, size)).astype(float)
    rows, columns = optimize.linear_sum_assignment(cost)
    found = chance.assign(cost)
    assert sorted(found) == list(range(size))
    assert cost[range(size), found].sum() == cost[rows, columns].sum()


def test_one_answer_to_all_texts_is_refused_but_for_rounding() -> None:
    answer = RNG.standard_normal(16)
    rounded = [answer * (1 + 1e-7 * i) for i in range(4)]
    with pytest.raises(DataError, match="4 different inputs one answer"):
        sense.check_answers_differ(rounded, 64)
    sense.check_answers_differ([*rounded, answer * 1.01], 64)


@pytest.mark.parametrize(
    ("others", "margin", "told"), [(0, 0.01, False), (2, 0.03, False), (4, 0.03, True)]
)
def test_agreement_that_one_label_for_all_would_keep_is_refused(
    others: int, margin: float, told: bool
) -> None:
    labels = np.array([1] * others + [0] * (100 - others))
    baseline = Answers(tuple(np.eye(3)[labels] + 0.1 * RNG.standard_normal((100, 3))))
    alike = Answers(tuple(np.eye(3)[np.zeros(100, int)]))
    lost = 1 - quality.compare("agreement", [], baseline, alike).candidate(np.ones((1, 100)))[0]
    assert (lost > margin) == told
    if told:
        return sense.check_agreement_can_be_lost(baseline, margin)
    with pytest.raises(DataError, match="one label"):
        sense.check_agreement_can_be_lost(baseline, margin)


def test_an_interval_without_width_is_refused_unless_nothing_was_lost() -> None:
    def gate(measured: float) -> Gate:
        return Gate("quality.x", "pass", measured, 0.1, (measured, measured), "")

    sense.check_examples_differ([gate(0.0), gate(1.0)], 50)
    with pytest.raises(DataError, match="copies of one example"):
        sense.check_examples_differ([gate(0.03)], 50)


def test_a_language_model_worse_than_guessing_is_reported() -> None:
    section = {"baseline": {"value": 900.0, "interval": [800.0, 1000.0]}}
    assert sense.judge_perplexity(section, 700)["verdict"] == "below chance"
    assert sense.judge_perplexity(section, 5000)["warnings"] == []


def pair_objects(labels: list[int], answered: list[int]) -> sense.Labelled:
    """Labels of objects in the right places, one in each image."""
    rng = np.random.default_rng(0)
    seen = []
    for label, answer in zip(labels, answered, strict=True):
        left, top = rng.uniform(0, 50, 2)
        box = np.array([[left, top, left + 20, top + 30]], np.float32)
        truth = [Labelled(label, (left, top, 20.0, 30.0), False)]
        seen.append(detection.match(Objects(np.array([0.9]), np.array([answer]), box), truth))
    answers, task = Answers((), None, seen=tuple(seen)), tasks.find_task("object-detection")
    labelled = sense.pair_labelled_answers("map", task, [], answers, None)
    assert labelled is not None
    return labelled


def test_a_detector_whose_labels_are_swapped_is_refused() -> None:
    labels = np.random.default_rng(0).integers(0, 2, 60)
    right = pair_objects(labels.tolist(), labels.tolist())
    names = ("cat", "dog")
    assert not sense.compare_with_chance("map", right, None, names, 0.95, True)["warnings"]
    swapped = pair_objects(labels.tolist(), (1 - labels).tolist())
    with pytest.raises(DataError, match="one reads cat as dog, dog as cat"):
        sense.compare_with_chance("map", swapped, None, names, 0.95, True)


def test_a_detector_that_misses_the_one_object_of_a_rare_label_is_not_refused() -> None:
    rare = pair_objects([*[0] * 300, 1], [0] * 301)
    section = sense.compare_with_chance("map", rare, None, ("person", "dog"), 0.95, True)
    assert section["verdict"] == "too few rows to tell"
