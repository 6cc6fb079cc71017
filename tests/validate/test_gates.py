"""An inconclusive gate names the number of examples that would decide it."""

from __future__ import annotations

import pytest

from optimizer.validate.gates import make_gate
from optimizer.validate.quality.significance import Decision


@pytest.mark.parametrize(
    ("interval", "needed", "message"),
    [
        ((0.00, 0.02), 700, "; about 700 examples would decide"),
        (
            (0.001, 0.003),
            50,
            "; too few examples to decide: about 50 are needed",
        ),
        ((0.02, 0.03), 50, "; too few examples to decide: about 50 are needed"),
        ((0.00, 0.02), None, "that no number of examples would decide"),
    ],
)
def test_it_says_what_would_decide(
    interval: tuple[float, float], needed: int | None, message: str
) -> None:
    decision = Decision("inconclusive", 0.01, interval, 0.01, 0.95, 40, needed)
    assert make_gate("quality.cosine", decision, "cosine").message.endswith(message)
