"""A message that names a limit shows which of two numbers is larger."""

from __future__ import annotations

import re

import pytest

from optimizer.validate import gates
from optimizer.validate.gates import Gate
from optimizer.validate.ledger.breach import write_breach
from optimizer.validate.ledger.pieces.pieces import Element, JudgedPiece
from optimizer.validate.quality.significance import Decision
from optimizer.validate.timing import speed_gates

NEAR = 1 + 1e-6


def failed(low: float, margin: float) -> Decision:
    return Decision("fail", 2 * low, (low, 3 * low), margin, 0.95, 100, None)


def numbers(message: str) -> list[float]:
    return [float(n) for n in re.findall(r"\d+\.\d+", message)]


def p99(low: float, limit: float) -> Gate:
    return speed_gates.judge_percentile({"p99": low, "p99_interval": [low, 2 * low]}, limit, "p99")


@pytest.mark.parametrize("limit", [2e-2, 0.995])
def test_what_decided_a_failed_gate_is_printed_beyond_its_limit(limit: float) -> None:
    *_, least, allowed = numbers(gates.describe_excess(failed(limit * NEAR, limit)))
    assert least > allowed
    *_, most, asked = numbers(gates.describe_miss(failed((1 - limit) * NEAR, 1 - limit)))
    assert most < asked
    *_, least, allowed = numbers(p99(limit * NEAR, limit).message)
    assert least > allowed


@pytest.mark.parametrize("limit", ["0.995", "0.0125", "0.69", "0.5", "1250"])
def test_a_limit_of_a_recipe_is_printed_as_it_stands_there(limit: str) -> None:
    assert float(write_breach(2 * float(limit), float(limit))[1]) == float(limit)
    if float(limit) < 1:
        assert numbers(gates.describe_miss(failed(1.0, 1 - float(limit))))[-1] == float(limit)


def test_a_limit_that_arithmetic_gave_has_no_more_digits_than_it_takes() -> None:
    assert write_breach(0.5, 0.1 / 3) == ("0.50", "0.033")
    assert write_breach(2.7e-7, 1.2169862513031725e-06) == ("2.7e-07", "1.2e-06")


def test_a_gate_that_did_not_fail_ends_as_before() -> None:
    decision = Decision("pass", 0.0, (-0.1, 0.1), 0.2, 0.95, 100, None)
    assert gates.describe_excess(decision) == gates.describe_miss(decision) == ""


def test_a_piece_barely_beyond_its_limit_is_not_once_as_far_off() -> None:
    element = Element(0, 3, 1.0, 1.0 + NEAR * 1e-3, 1e-3)
    problem = JudgedPiece("dense", "arithmetic", NEAR, "", (element,)).problem
    assert "1.000001 times" in problem
    *_, off, allowed = numbers(problem)
    assert off > allowed


def test_a_ratio_at_its_limit_is_read_as_it_is() -> None:
    cells = [("here", {"median": 1.0004, "interval": (1.0001, 1.1)})]
    assert "1.0004 times" in speed_gates.judge_float(cells, lambda _: "").message


def test_equal_numbers_are_printed_alike() -> None:
    assert write_breach(0.5, 0.5) == ("0.50", "0.50")
