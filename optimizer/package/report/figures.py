"""Format measured numbers: unit, digits, and text for missing ones.

Every function takes any JSON value and returns text. A missing value is "not measured", a NaN "not
a number", so that neither looks like a result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

NOT_MEASURED = "not measured"
NOT_A_NUMBER = "not a number"
SHARES = frozenset(
    {
        *("accuracy", "top5_accuracy", "agreement", "f1", "micro_f1", "exact_match"),
        *("probe_accuracy", "retrieval", "recall_at_1", "recall_at_5"),
    }
)

TITLES = {"ndcg": "nDCG@10", "mrr": "MRR"}

Writer = Callable[[Any], str]


def finite(value: Any) -> float | None:
    """Return a number of the report if it is finite, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def is_broken(value: Any) -> bool:
    """Return True for a value of the report that is not a finite number."""
    return value is not None and finite(value) is None


def _or_words(value: Any, write: Callable[[float], str]) -> str:
    number = finite(value)
    if number is not None:
        return write(number).replace("-", "−")
    if value is None:
        return NOT_MEASURED
    if isinstance(value, float) and math.isinf(value):
        return "infinite"
    return NOT_A_NUMBER


def plain(value: Any) -> str:
    """Format a dimensionless number for the report: a whole number in full, others with four
    significant digits; below 0.001 and from 1e6 with two, as 1.2e-07."""

    def write(x: float) -> str:
        if x != 0 and (abs(x) < 1e-3 or abs(x) >= 1e6):
            return f"{x:.1e}"
        return f"{x:,.0f}" if x == int(x) else f"{x:.4g}"

    return _or_words(value, write)


def error(value: Any) -> str:
    """Format a relative error for the report with four decimals, as 0.0210; below 0.001 as
    1.2e-07."""
    return _or_words(value, lambda x: f"{x:.4f}" if abs(x) >= 1e-3 or x == 0 else f"{x:.1e}")


def ms(value: Any) -> str:
    """Format milliseconds, 12.3 ms: no decimals from 100, one from 10, two from 1, else three."""

    def write(x: float) -> str:
        decimals = 0 if abs(x) >= 100 else 1 if abs(x) >= 10 else 2 if abs(x) >= 1 else 3
        return f"{x:,.{decimals}f} ms"

    return _or_words(value, write)


def size(value: Any) -> str:
    """Format bytes for the report in B, kB, MB or GB (powers of 1000); one decimal from kB to 999.9
    GB."""

    def write(x: float) -> str:
        for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
            if abs(x) >= scale:
                return f"{x / scale:.{1 if abs(x) < 1000 * scale else 0}f} {unit}"
        return f"{x:.0f} B"

    return _or_words(value, write)


def times(value: Any) -> str:
    """Format a ratio for the report with two decimals: 0.41×."""
    return _or_words(value, lambda x: f"{x:.2f}×")


def whole(value: Any) -> str:
    """Format a count for the report without decimals: 12,345."""
    return _or_words(value, lambda x: f"{x:,.0f}")


def percent(value: Any) -> str:
    """Format a share from 0 to 1 for the report in percent with one decimal: 90.1 %."""
    return _or_words(value, lambda x: f"{100 * x:.1f} %")


def nats(value: Any) -> str:
    """Format for the report a change of the log-likelihood with its sign: +0.0123 nats/token."""
    return _or_words(value, lambda x: f"{x:+.4f} nats/token")


def title(metric: str) -> str:
    """Return a metric's name as the first words of a line of the report."""
    return TITLES.get(metric) or metric.replace("_", " ").capitalize()


def level(metric: str) -> Writer:
    """Return the report's formatter of a metric's values: shares in percent, others with four
    decimals."""
    if metric in SHARES:
        return percent
    return lambda v: _or_words(v, lambda x: f"{x:.4f}")


def change(metric: str) -> Writer:
    """Return the report's formatter of a metric's differences: "+0.12 points" for shares, else
    "+0.0012"."""
    if metric in SHARES:
        return lambda v: _or_words(v, lambda x: f"{100 * x:+.2f} points")
    return lambda v: _or_words(v, lambda x: f"{x:+.4f}")


def interval(bounds: Any, write: Writer, unit: bool = True) -> str:
    """Format the interval `bounds` for the report as "86.5 to 90.1 %"; an end None is unknown: "at
    least 19.0 ms". "" for two such ends or another value. unit: False leaves out the unit of two
    known ends."""
    if not isinstance(bounds, list | tuple) or len(bounds) != 2:
        return ""
    low, high = (write(b) for b in bounds)
    if None in bounds:  # too few samples to bound that end
        if bounds[0] is None and bounds[1] is None:
            return ""
        return f"at least {low}" if bounds[1] is None else f"at most {high}"
    numbers = all(finite(b) is not None for b in bounds)
    if numbers:
        low = low.partition(" ")[0].removesuffix("×")
        high = high if unit else high.partition(" ")[0].removesuffix("×")
    return f"{low} to {high}"
