"""Each metric against another project's, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from optimizer.data.datasets import Sample
from optimizer.foundation.errors import DataError
from optimizer.validate.quality import metrics, quality
from optimizer.validate.quality.quality import Answers

RNG = np.random.default_rng(0)
LABELS = RNG.integers(0, 3, 200)
LOGITS = np.eye(3)[LABELS] + RNG.standard_normal((200, 3)) * 0.7
WORSE = LOGITS + RNG.standard_normal((200, 3)) * 0.7
ROWS = [Sample(f"text {i}", label=int(label)) for i, label in enumerate(LABELS)]
ONES = np.ones((1, 200))


def answers(values: np.ndarray, pair: np.ndarray | None = None) -> Answers:
    return Answers(tuple(values), None if pair is None else tuple(pair))


def both(name: str, rows: list[Sample], a: Answers, b: Answers) -> tuple[float, float]:
    metric = quality.compare(name, rows, a, b)
    ones = np.ones((1, len(rows)))
    return float(metric.baseline(ones)[0]), float(metric.candidate(ones)[0])


def test_accuracy_is_the_share_of_right_labels() -> None:
    found = both("accuracy", ROWS, answers(LOGITS), answers(WORSE))
    assert found == ((LOGITS.argmax(1) == LABELS).mean(), (WORSE.argmax(1) == LABELS).mean())


def test_top5_accuracy_equals_scikit_learns() -> None:
    judge = pytest.importorskip("sklearn.metrics", reason="scikit-learn judges it")
    labels = RNG.integers(0, 20, 200)
    rows = [Sample(f"image {i}", label=int(label)) for i, label in enumerate(labels)]
    one, other = (np.eye(20)[labels] + RNG.standard_normal((200, 20)) * s for s in (0.7, 1.5))
    expected = [
        judge.top_k_accuracy_score(labels, x, k=5, labels=np.arange(20)) for x in (one, other)
    ]
    assert both("top5_accuracy", rows, answers(one), answers(other)) == pytest.approx(expected)
    assert expected[0] > expected[1]


def test_top5_accuracy_of_no_more_than_five_labels_says_nothing_and_is_refused() -> None:
    with pytest.raises(DataError, match="3 labels"):
        both("top5_accuracy", ROWS, answers(LOGITS), answers(WORSE))


@pytest.mark.parametrize("best", [1, 5])
def test_recall_of_pairs_is_scikit_learns_in_both_directions(best: int) -> None:
    judge = pytest.importorskip("sklearn.metrics", reason="scikit-learn judges it")
    texts, columns, name = RNG.permutation(40), np.arange(40), f"recall_at_{best}"
    rows = [Sample(f"image {i}", label=int(text)) for i, text in enumerate(texts)]
    one, other = (np.eye(40)[texts] + RNG.standard_normal((40, 40)) * s for s in (0.4, 0.6))
    one[:, :8] += 1  # texts that many images are near to, so that the directions differ
    expected = [
        judge.top_k_accuracy_score(truth, scores, k=best, labels=columns)
        for x in (one, other)
        for truth, scores in ((texts, x), (np.argsort(texts), x.T))
    ]
    assert expected[0] != expected[1]
    found = both(name, rows, answers(one), answers(other))
    assert found == pytest.approx((np.mean(expected[:2]), np.mean(expected[2:])))
    assert both(name, rows, answers(0 * one), answers(other))[0] == 0  # all alike: none found
    with pytest.raises(DataError, match="label 1 has 2 images"):
        both(name, [replace(r, label=(r.label or 1) % 39) for r in rows], *2 * [answers(one)])
    with pytest.raises(DataError, match=f"the best {best} always"):
        both(name, rows[:best], *2 * [answers(one[:best])])


@pytest.mark.parametrize("best", [1, 5])
def test_recall_of_images_and_captions_is_that_of_their_cosines(best: int) -> None:
    name, rows = f"recall_at_{best}", [Sample(f"{i}", text_pair=f"text {i}") for i in range(40)]
    vectors = RNG.standard_normal((40, 8))
    systems = [
        (vectors + RNG.standard_normal((40, 8)) * s, 7 * vectors * RNG.uniform(1, 9, (40, 1)))
        for s in (0.5, 0.9)
    ]
    unit = [[v / np.linalg.norm(v, axis=1, keepdims=True) for v in pair] for pair in systems]
    labelled = [replace(row, label=i) for i, row in enumerate(rows)]
    expected = both(name, labelled, *(answers(images @ texts.T) for images, texts in unit))
    pairs = [answers(images, texts) for images, texts in systems]
    assert both(name, rows, *pairs) == expected
    assert 0.2 < expected[1] < expected[0] <= 1
    with pytest.raises(DataError, match="two images have the text_pair 'text 1'"):
        both(name, [*rows[:-1], replace(rows[-1], text_pair="text 1")], *pairs)


def test_agreement_needs_no_labels_and_is_the_share_of_answers_that_stay() -> None:
    rows = [Sample(f"image {i}") for i in range(200)]
    found = both("agreement", rows, answers(LOGITS), answers(WORSE))
    assert found == (1.0, (LOGITS.argmax(1) == WORSE.argmax(1)).mean())
    decision = metrics.decide(
        quality.compare("agreement", rows, answers(LOGITS), answers(WORSE)), 200, 0.02, 0.95
    )
    assert decision.drop == pytest.approx(1 - found[1])


def test_f1_equals_scikit_learns() -> None:
    metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn judges F1")
    found = both("f1", ROWS, answers(LOGITS), answers(WORSE))
    expected = [metrics.f1_score(LABELS, x.argmax(1), average="macro") for x in (LOGITS, WORSE)]
    assert found == pytest.approx(expected)


def test_rank_correlation_equals_scipys_also_on_a_resample() -> None:
    stats = pytest.importorskip("scipy.stats", reason="SciPy judges the rank correlation")
    values, scores = RNG.standard_normal(80).round(1), RNG.integers(0, 6, 80).astype(float)
    value = metrics.spearman(values, scores)
    weights = RNG.multinomial(80, np.full(80, 1 / 80), 5).astype(float)
    for row, found in zip(
        [np.ones(80), *weights], value(np.vstack([np.ones(80), weights])), strict=True
    ):
        drawn = np.repeat(np.arange(80), row.astype(int))
        assert found == pytest.approx(stats.spearmanr(values[drawn], scores[drawn]).statistic)


def test_weights_mean_repetition() -> None:
    metric = quality.compare("f1", ROWS, answers(LOGITS), answers(WORSE))
    weights = RNG.integers(0, 3, (1, 200)).astype(float)
    drawn = np.repeat(np.arange(200), weights[0].astype(int))
    again = quality.compare(
        "f1", [ROWS[i] for i in drawn], answers(LOGITS[drawn]), answers(WORSE[drawn])
    )
    ones = np.ones((1, len(drawn)))
    assert metric.candidate(weights) == pytest.approx(again.candidate(ones))


def test_retrieval_finds_the_pair_and_loses_it_when_shuffled() -> None:
    texts, noise = RNG.standard_normal((50, 8)), 0.01 * RNG.standard_normal((50, 8))
    rows = [Sample(f"a{i}", text_pair=f"b{i}") for i in range(50)]
    good = answers(texts, texts + noise)
    found = both("retrieval", rows, good, answers(texts, np.roll(texts, 1, 0)))
    assert found == (1.0, 0.0)


def test_retrieval_by_label_ignores_the_text_itself() -> None:
    points = np.array([[1, 0.0], [1, 0.1], [0, 1.0], [0.1, 1.0], [-1, 0.0]])
    rows = [Sample(f"t{i}", label=label) for i, label in enumerate([0, 0, 1, 1, 2])]
    assert both("retrieval", rows, answers(points), answers(points))[0] == 0.8


def test_a_probe_is_fit_on_the_baseline_and_judges_both() -> None:
    centres = RNG.standard_normal((3, 10)) * 2
    points = centres[LABELS] + RNG.standard_normal((200, 10))
    train = (ROWS[:100], answers(points[:100]))
    metric = quality.compare(
        "probe_accuracy", ROWS[100:], answers(points[100:]), answers(-points[100:]), train
    )
    ones = np.ones((1, 100))
    assert metric.baseline(ones)[0] > 0.9
    assert metric.candidate(ones)[0] < 0.4


def test_a_probe_is_about_as_good_as_scikit_learns() -> None:
    linear = pytest.importorskip("sklearn.linear_model", reason="scikit-learn judges the probe")
    points = RNG.standard_normal((300, 40))
    labels = (points @ RNG.standard_normal(40) + RNG.standard_normal(300) > 0).astype(int)
    theirs = linear.RidgeClassifierCV(alphas=np.logspace(-3, 3, 15)).fit(points[:200], labels[:200])
    ours = quality.Probe.fit(points[:200], labels[:200])
    agree = (ours.predict(points[200:]) == theirs.predict(points[200:])).mean()
    assert agree > 0.93


def test_words_of_one_text_are_resampled_together() -> None:
    truth = [np.array([0, 1, 1]), np.array([1, 0])]
    rows = [
        Sample("a b c", words=("a", "b", "c"), tags=(0, 1, 1)),
        Sample("d e", words=("d", "e"), tags=(1, 0)),
    ]
    zeros = (np.zeros(1), np.zeros(1))
    right = Answers(zeros, words=tuple(truth))
    wrong = Answers(zeros, words=(truth[0], 1 - truth[1]))
    metric = quality.compare("accuracy", rows, right, wrong)
    assert metric.outcomes is None
    assert metric.candidate(np.array([[1.0, 1.0], [0.0, 2.0]])).tolist() == [0.6, 0.0]


def test_the_cosine_of_the_baseline_to_itself_is_one() -> None:
    assert both("cosine", ROWS, answers(LOGITS), answers(LOGITS)) == (1.0, pytest.approx(1.0))
    assert quality.compute_cosines([np.zeros(3)], [np.zeros(3)]).tolist() == [1.0]
    assert quality.compute_cosines([np.zeros(3)], [np.ones(3)]).tolist() == [0.0]


@pytest.mark.parametrize(
    ("metric", "message"),
    [("spearman", "no score"), ("probe_accuracy", "validate.train"), ("retrieval", "no label")],
)
def test_rows_without_what_a_metric_needs_are_refused(metric: str, message: str) -> None:
    rows = [Sample(f"t{i}", label=0 if metric == "probe_accuracy" else None) for i in range(200)]
    with pytest.raises(DataError, match=message):
        quality.compare(metric, rows, answers(LOGITS), answers(WORSE))


def test_a_label_the_model_does_not_have_is_refused() -> None:
    rows = [Sample("t", label=7)] * 200
    with pytest.raises(DataError, match="3 labels"):
        quality.compare("accuracy", rows, answers(LOGITS), answers(WORSE))


def test_the_report_says_candidate_minus_baseline_with_its_interval() -> None:
    metric = quality.compare("accuracy", ROWS, answers(LOGITS), answers(-LOGITS))
    cosines = quality.compute_cosines(list(LOGITS), list(-LOGITS))
    decision, section = quality.judge("accuracy", metric, 200, 0.02, 0.95, cosines)
    change = section["candidate"]["value"] - section["baseline"]["value"]
    assert section["difference"]["value"] == pytest.approx(change)
    low, high = section["difference"]["interval"]
    assert low <= change <= high
    assert decision.verdict == "fail"


def test_f1_passes_no_margin_that_three_unseen_errors_would_break() -> None:
    """None seen in n examples leaves up to 3 / n at 95 %."""
    truth = [np.array([i % 2]) for i in range(300)]
    metric = metrics.f1_metric(truth, truth, truth)
    for lost, verdict in ((2.5, "inconclusive"), (4, "pass")):
        decision, _ = quality.judge("f1", metric, 300, lost / 300, 0.95, np.ones(300))
        assert decision.verdict == verdict


def test_what_each_example_gave_is_kept() -> None:
    right = np.array([True, False, True])
    cosines = np.array([1.0, 0.25, 0.5])
    _, section = quality.judge("accuracy", metrics.shares(right, ~right), 3, 0.02, 0.95, cosines)
    assert section["each"] == {"kind": "right", "candidate": "010"}
    _, section = quality.judge("cosine", metrics.mean_cosine(cosines), 3, 0.02, 0.95, cosines)
    assert section["each"] == {"kind": "cosine", "candidate": [1.0, 0.25, 0.5]}
    ranked = metrics.rank_correlation(cosines, -cosines, right + 0.0)
    _, section = quality.judge("spearman", ranked, 3, 0.02, 0.95, cosines)
    assert section["each"] == {
        "kind": "scores",
        "truth": [1.0, 0.0, 1.0],
        "candidate": [-1.0, -0.25, -0.5],
    }
    words = [np.array([0, 3]), np.array([1]), np.array([0])]
    metric = metrics.f1_metric(words, words, [np.array([0, -1]), *words[1:]])
    _, section = quality.judge("f1", metric, 3, 0.02, 0.95, None)
    assert section["each"] == {
        "kind": "labels",
        "truth": ["0 3", "1", "0"],
        "candidate": ["0 -1", "1", "0"],
    }
