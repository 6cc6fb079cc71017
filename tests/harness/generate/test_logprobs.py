from __future__ import annotations

import numpy as np
import pytest

from optimizer.harness.generate.logprobs import logprobs

SCORES = np.round(np.random.default_rng(0).standard_normal(500), 1).astype(np.float32)  # with ties


@pytest.mark.parametrize("count", [0, 1, 7, 500, 600])
def test_the_likeliest_come_in_order_and_of_equal_ones_the_lower_first(count: int) -> None:
    order = sorted(range(SCORES.size), key=lambda i: (-SCORES[i], i))[:count]
    assert [token for token, _ in logprobs(SCORES, 3, count).top] == order


def test_probabilities_sum_to_one_and_the_chosen_has_its_own() -> None:
    answer = logprobs(SCORES, 3, SCORES.size)
    assert sum(np.exp(value) for _, value in answer.top) == pytest.approx(1)
    assert dict(answer.top)[3] == answer.chosen


def test_scores_far_from_zero_do_not_overflow() -> None:
    assert logprobs(np.array([1e30, 0], np.float32), 0, 1).chosen == 0
