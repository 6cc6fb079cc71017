"""nDCG and MRR of queries, each with its documents."""

from __future__ import annotations

import numpy as np
import pytest

from optimizer.data.datasets import Sample
from optimizer.foundation.errors import DataError
from optimizer.validate.quality import chance, evaluation, quality
from optimizer.validate.quality.metrics import decide, rank_queries
from optimizer.validate.quality.quality import Answers

SIZES = (1, 2, 3, 9, 14, 30)


def rows(relevance: list[list[float]]) -> list[Sample]:
    """A row per document, the queries mixed."""
    each = [
        Sample(text=f"query {q}", text_pair=f"document {q} {d}", score=value)
        for q, values in enumerate(relevance)
        for d, value in enumerate(values)
    ]
    return [each[i] for i in np.random.default_rng(0).permutation(len(each))]


def answers(values: np.ndarray) -> Answers:
    return Answers(tuple(np.array([v], np.float32) for v in values))


def test_ndcg_is_that_of_sklearn_with_graded_relevance_and_tied_scores() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(1)
    relevance = [rng.integers(0, 4, size).astype(float) for size in SIZES]
    scores = [rng.integers(0, 6, size).astype(float) for size in SIZES]
    queries = [f"{q}" for q, size in enumerate(SIZES) for _ in range(size)]
    ranking = rank_queries("ndcg", queries, np.concatenate(relevance))
    got = ranking.values(ranking.weights(np.concatenate(scores)[ranking.rows]))
    expected = [
        metrics.ndcg_score(r[None], s[None], k=10)
        for r, s in list(zip(relevance, scores, strict=True))[1:]
    ]
    assert ranking.left_out == 1
    np.testing.assert_allclose(got, expected, rtol=1e-12)


def test_mrr_is_the_reciprocal_rank_of_the_first_relevant_document() -> None:
    relevance = np.array([0, 1, 0, 1, 0, 0, 2, 0, 1], float)
    scores = np.array([3, 2, 1, 0, 5, 5, 5, 1, 9], float)
    ranking = rank_queries("mrr", list("aaaabbbcc"), relevance)
    # a: second; b: one of three at one score, the middle rank 2; c: first
    got = ranking.values(ranking.weights(scores[ranking.rows]))
    np.testing.assert_allclose(got, [1 / 2, 1 / 2, 1])


def test_queries_that_no_order_changes_are_left_out_and_counted() -> None:
    judged = rows([[1], [0, 0], [1, 1, 1], [0, 1], [0, 0, 2]])
    values = np.arange(len(judged), dtype=float)
    metric = quality.compare("ndcg", judged, answers(values), answers(values))
    _, section = quality.judge("ndcg", metric, len(judged), 0.05, 0.95, None)
    assert (section["examples"], section["left_out"]) == (2, 3)


def test_rows_without_a_query_to_judge_are_refused() -> None:
    with pytest.raises(DataError, match="no order of documents is better than another in any of 2"):
        evaluation.group_ranking("mrr", rows([[1], [0, 0]]))


def test_relevance_below_zero_is_refused() -> None:
    with pytest.raises(DataError, match=r"score is -2, and metric ndcg reads it as relevance"):
        evaluation.group_ranking("ndcg", rows([[1, -2]]))


@pytest.mark.parametrize(
    ("queries", "lost", "verdict"),
    [(400, 0, "pass"), (400, 60, "fail"), (60, 0, "inconclusive")],
)
def test_the_paired_test_is_over_queries(queries: int, lost: int, verdict: str) -> None:
    """Two documents a query, one relevant: an exchanged pair costs half of its MRR."""
    ranking = rank_queries(
        "mrr", [f"{i // 2:04}" for i in range(2 * queries)], np.tile([1.0, 0.0], queries)
    )
    baseline = np.tile([1.0, 0.0], queries)
    candidate = baseline.copy()
    candidate[: 2 * lost] *= -1
    metric = quality.ranking_metric(ranking, baseline, candidate)
    decision = decide(metric, queries, 0.02, 0.95)
    assert (decision.verdict, decision.drop) == (verdict, pytest.approx(lost / queries / 2))


def test_scores_that_do_not_depend_on_relevance_are_no_better_than_chance() -> None:
    rng = np.random.default_rng(2)
    relevance = rng.integers(0, 2, 600).astype(float)
    for metric in ("ndcg", "mrr"):
        ranking = rank_queries(metric, [f"{i % 60}" for i in range(600)], relevance)
        right, wrong = ranking.relevance, rng.standard_normal(len(ranking.rows))
        assert chance.compare_with_chance(chance.agree_on_ranking(ranking, right), 0.95).above
        assert not chance.compare_with_chance(chance.agree_on_ranking(ranking, wrong), 0.95).above
