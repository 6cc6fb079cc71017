"""Each declared limit follows from its derivation, holds for real arithmetic, and catches coarser
arithmetic than it is declared for."""

import numpy as np
import pytest

from optimizer.validate.precisions import FLIP, HIGHEST, PAIRS, UNIT, Pair, limit
from optimizer.validate.tolerances import TABLE

INPUTS, OUTPUTS, ROWS = 1536, 256, 64


@pytest.mark.parametrize("pair", PAIRS.values(), ids=[" ".join(p) for p in PAIRS])
def test_a_limit_is_its_derivation_to_one_digit(pair: Pair) -> None:
    digits = f"{pair.limit:.0e}"
    assert float(digits) == pair.limit
    assert 0.7 < pair.limit / pair.derived < 1.3


def rounded(values: np.ndarray, precision: str) -> np.ndarray:
    """To `precision`, nearest even, in float64."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.rint(mantissa / UNIT[precision]) * UNIT[precision], exponent)


def operands() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((ROWS, INPUTS)), rng.standard_normal((INPUTS, OUTPUTS)) * 0.05


def apart(found: np.ndarray, wanted: np.ndarray) -> float:
    """Relative L2, of the worst row."""
    return float((np.linalg.norm(found - wanted, axis=1) / np.linalg.norm(wanted, axis=1)).max())


def product_in(precision: str) -> float:
    """How far a product is from the exact one, its operands and result in `precision`."""
    x, w = operands()
    found = rounded(x, precision).astype(np.float32) @ rounded(w, precision).astype(np.float32)
    kept = "fp32" if precision == "tf32" else precision
    return apart(rounded(found.astype(np.float64), kept), x @ w)


def test_rounding_is_what_numpy_does() -> None:
    values = np.random.default_rng(1).standard_normal(10_000)
    np.testing.assert_array_equal(rounded(values, "fp32"), values.astype(np.float32))
    np.testing.assert_array_equal(
        rounded(values * 8, "fp16"), (values * 8).astype(np.float16).astype(np.float64)
    )


@pytest.mark.parametrize("precision", UNIT)
def test_a_product_stays_within_the_limit_and_the_limit_is_near(precision: str) -> None:
    measured = product_in(precision)
    assert measured <= limit("fp32", precision, "piece")
    assert measured >= limit("fp32", precision, "piece") / 200


@pytest.mark.parametrize("coarser", ["tf32", "fp16", "bf16"])
def test_coarser_arithmetic_than_fp32_is_caught(coarser: str) -> None:
    assert product_in(coarser) > 10 * limit("fp32", "fp32", "piece")


def quantized(values: np.ndarray, kind: str) -> np.ndarray:
    step = np.abs(values).max(0) / HIGHEST[kind]
    return np.asarray(np.rint(values / step) * step)


@pytest.mark.parametrize("kind", HIGHEST)
def test_weights_that_lost_bits_are_caught_at_fp16(kind: str) -> None:
    x, w = operands()
    assert apart(x @ quantized(w, kind), x @ w) > limit("fp32", "fp16", "piece")


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_codes_of_values_that_were_rounded_first_flip_no_more_than_derived(precision: str) -> None:
    x, w = operands()
    step = 4 / HIGHEST["int8"]
    exact = np.clip(np.rint(x / step), -127, 127)
    found = np.clip(np.rint(rounded(x, precision) / step), -127, 127)
    assert apart(found @ w, exact @ w) <= 4 * FLIP[precision]


def test_finer_precisions_have_tighter_limits() -> None:
    for of in ("piece", "whole"):
        limits = [limit("fp32", p, of) for p in ("fp32", "tf32", "fp16", "bf16")]
        assert limits == sorted(limits)
    assert TABLE["piece fp32"].limit == limit("fp32", "fp32", "piece")
