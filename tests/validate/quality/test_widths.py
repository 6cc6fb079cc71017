"""Vectors of different widths are judged by the use that each system makes of its own."""

from __future__ import annotations

import numpy as np
import pytest

from optimizer.data.datasets import Sample
from optimizer.validate.quality import widths
from optimizer.validate.quality.quality import Answers


def answers(labels: list[int], width: int, told: bool) -> Answers:
    """Embeddings whose first value is the label, or is random."""
    noise = np.random.default_rng(width).standard_normal((len(labels), width))
    noise[:, 0] += 8 * np.array(labels) * told
    return Answers(tuple(noise))


@pytest.mark.parametrize("told", [True, False])
def test_each_system_has_a_probe_of_its_own(told: bool) -> None:
    labels, train = [0, 1] * 40, [0, 1] * 60
    rows, shown = (
        [Sample(str(i), label=n) for i, n in enumerate(part)] for part in (labels, train)
    )
    metric = widths.compare_probes(
        rows,
        (answers(labels, 12, True), answers(labels, 5, told)),
        shown,
        (answers(train, 12, True), answers(train, 5, told)),
    )
    even = np.ones((1, len(rows)))
    assert metric.baseline(even)[0] > 0.95
    assert (metric.candidate(even)[0] > 0.95) == told
