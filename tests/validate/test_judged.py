"""Each example of each output has a limit of its own."""

from pathlib import Path

import numpy as np
import pytest

from optimizer.recipe import Validation
from optimizer.validate.judged import judged
from optimizer.validate.materials import Errors, Materials
from optimizer.validate.tolerances import Tolerance
from optimizer.validate.trace import Trace

NOWHERE = Path("nowhere")
COARSE, FINE = 0.4, 0.01


class Two(Materials):
    """Two outputs of two examples: one that quantization moves far, one that it hardly moves."""

    @property
    def compared(self) -> list[str]:
        return ["coarse", "fine"]


def moved(
    name: str, example: int, by: float, coarse: float = COARSE, share: float = 1.0
) -> tuple[float, float]:
    """(limit, worst) where one example of one output lies `by` from what is expected."""
    made = Two(Validation.model_construct(), NOWHERE, NOWHERE, NOWHERE, NOWHERE, NOWHERE, [])
    made.quantization_error = FINE if coarse == COARSE else coarse
    made.errors = {
        "coarse": Errors(coarse / 2, (coarse, 0.0)),
        "fine": Errors(FINE, (FINE, FINE)),
    }
    mask = np.ones((2, 3), np.int64)
    expected = {n: np.ones((2, 3, 4), np.float32) for n in ("coarse", "fine")}
    found = {n: a.copy() for n, a in expected.items()}
    found[name][example] *= 1 + by
    limit, measured = judged(
        made, [found], [Trace(mask, {}, expected)], Tolerance(1e-6, "", share=share)
    )
    return limit, measured.worst


@pytest.mark.parametrize(
    ("name", "example", "own"),
    [("coarse", 0, COARSE), ("coarse", 1, COARSE / 2), ("fine", 0, FINE)],
)
def test_an_example_may_lie_as_far_as_quantization_moves_it_or_its_output(
    name: str, example: int, own: float
) -> None:
    limit, worst = moved(name, example, 0.9 * own)
    assert worst == pytest.approx(0.9 * own, rel=1e-3)
    assert worst <= limit
    limit, worst = moved(name, example, 1.1 * own)
    assert worst == pytest.approx(1.1 * own, rel=1e-3)
    assert worst > limit


def test_what_is_not_finite_is_beyond_every_limit() -> None:
    limit, worst = moved("coarse", 0, float("nan"))
    assert not worst <= limit


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("by", [0.1, float("nan")])
def test_a_state_that_is_infinitely_far_from_the_float_model_lets_nothing_pass(
    share: float, by: float
) -> None:
    limit, worst = moved("coarse", 0, by, coarse=float("inf"), share=share)
    assert limit == 1e-6
    assert not worst <= limit
