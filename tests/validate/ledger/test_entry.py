"""The entry of a hop names the outputs that its limits cannot judge."""

from __future__ import annotations

import numpy as np
import pytest

from optimizer.validate.ledger.entry import HopOutputs, make_entry
from optimizer.validate.ledger.limits.spread import Spread
from optimizer.validate.ledger.pieces.pieces import JudgedPiece
from optimizer.validate.ledger.trace import Trace

EXPECTED = np.array([[3.0, 4.0], [0.0, 5.0]])


@pytest.mark.parametrize(("limit", "unproven"), [(0.5, False), (0.999, False), (1.0, True)])
def test_a_limit_that_accepts_zeros_is_named_and_no_other(limit: float, unproven: bool) -> None:
    trace = Trace(np.ones((2, 3), np.int64), {}, {"logits": EXPECTED})
    spread = Spread(4, 1e-7, {"logits": limit / 2}, {"logits": limit})
    zeros = [{"logits": np.zeros_like(EXPECTED)}]
    entry = make_entry("lower", "state in torch", HopOutputs(zeros, [trace], spread), [])
    assert entry.ok is unproven  # zeros pass where the limit is 1, and there alone
    assert ("logits from end to end" in entry.unproven) is unproven


def test_a_part_whose_limit_accepts_zeros_is_named_and_no_other() -> None:
    trace = Trace(np.ones((2, 3), np.int64), {}, {"logits": EXPECTED})
    spread = Spread(4, 1e-7, {"logits": 0.1}, {"logits": 0.5})
    parts = [
        JudgedPiece("fc1:input", "between", 0.2, "0.4"),
        JudgedPiece("fc2:input", "between", 0.2, "3", accepts_zeros=True),
    ]
    entry = make_entry("lower", "", HopOutputs([{"logits": EXPECTED}], [trace], spread), [], parts)
    assert entry.ok
    assert "the operators before fc2:input: " in entry.unproven
    assert "fc1" not in entry.unproven
