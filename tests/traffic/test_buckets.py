"""Shape buckets against all choices, one by one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from optimizer.traffic import buckets


def test_no_other_choice_of_buckets_costs_less() -> None:
    random = np.random.default_rng(0)
    lengths = {8 * int(n): w for w, n in enumerate(random.choice(20, 9, False) + 1, 1)}
    ends = sorted(lengths)

    def cost(length: int) -> float:
        return 100 + length**1.3

    def total(chosen: tuple[int, ...]) -> float:
        return sum(w * cost(min(e for e in chosen if e >= n)) for n, w in lengths.items())

    bare = sum(w * cost(n) for n, w in lengths.items())
    found = buckets.choose(lengths, cost, 12, ends[-1])
    assert [len(one.lengths) for one in found] == [*range(1, 10)]
    for count, one in enumerate(found, 1):
        others = ((*few, ends[-1]) for few in itertools.combinations(ends[:-1], count - 1))
        assert one.cost == pytest.approx(min(map(total, others)) / bare)
        assert one.cost == pytest.approx(total(one.lengths) / bare)


def test_a_longest_row_that_did_not_occur_still_has_a_bucket() -> None:
    found = buckets.choose({10: 5, 12: 1}, float, 4, 50)
    assert [one.lengths for one in found] == [(50,), (16, 50)]
    assert [one.cost for one in found] == pytest.approx([6 * 50 / 62, 6 * 16 / 62])
