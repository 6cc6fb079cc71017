"""Answers of the reference do not depend on the number of batches that are computed at a time."""

from __future__ import annotations

import numpy as np
import pytest

from optimizer.data.datasets import Sample
from optimizer.validate.quality import answers
from optimizer.validate.quality.answers import TorchRunner
from tests.conftest import sentences
from tests.validate.runs import Run


@pytest.mark.parametrize("paired", [False, True])
def test_batches_at_a_time_leave_bits_and_order_alone(
    paired: bool, runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    m = runs["w8"].materials()
    texts = sentences(40, seed=2)
    others = texts[::-1] if paired else [None] * len(texts)
    rows = [Sample(a, text_pair=b) for a, b in zip(texts, others, strict=True)]
    found = []
    for count in (1, 3):
        monkeypatch.setattr(TorchRunner, "at_once", count)
        found.append(answers.answer(m, TorchRunner(m), rows, "rows"))
    one, three = found
    np.testing.assert_array_equal(one.text, three.text)
    if paired:
        assert one.pair is not None
        assert three.pair is not None
        np.testing.assert_array_equal(one.pair, three.pair)
        np.testing.assert_allclose(one.pair, one.text[::-1], rtol=1e-4, atol=1e-5)
