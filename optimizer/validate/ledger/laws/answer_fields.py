"""Expected fields of an answer, and the differences of an answer from them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Near:
    """Expected numbers of an answer, and the difference that each may have."""

    values: Any  # the reference's numbers
    bounds: Any = 0.0  # largest difference of each


@dataclass(frozen=True)
class OneOf:
    """Expected text of an answer where each of `texts` is right."""

    texts: frozenset[str]


@dataclass(frozen=True)
class Judged:
    """Expected value of an answer's field that a function judges.

    problems: function of (actual value, prefix of the field's name in messages) that yields a
        sentence for each difference
    """

    problems: Callable[[Any, str], Iterator[str]]


FREE: Any = object()
"""Any value: it depends on a choice between labels that are both right."""


def differ(actual: Any, expected: Any, where: str = "") -> Iterator[str]:
    """Yield a sentence for each difference between an answer and the expected one.

    actual: the answer, or one of its fields
    expected: expected value: Near, OneOf, Judged, FREE, a mapping or list of these, or equal values
    where: name of the field, for messages; "" for a complete answer
    """
    if expected is FREE:
        return
    if isinstance(expected, Judged):
        yield from expected.problems(actual, f"{where}." if where else "")
    elif isinstance(expected, Near):
        yield from _far(actual, expected, where)
    elif isinstance(expected, OneOf):
        if actual not in expected.texts:
            yield f"{where} is {actual!r}, the reference's {' or '.join(sorted(expected.texts))}"
    elif isinstance(expected, Mapping):
        if not isinstance(actual, Mapping) or {*actual} != {*expected}:
            yield f"{where or 'the answer'} has the fields {list(actual)}, not {list(expected)}"
            return
        for name, value in expected.items():
            yield from differ(actual[name], value, f"{where}.{name}".lstrip("."))
    elif isinstance(expected, list):
        if len(actual) != len(expected):
            yield f"{where} has {len(actual)} elements, the reference's {len(expected)}"
            return
        for i, (f, e) in enumerate(zip(actual, expected, strict=True)):
            yield from differ(f, e, f"{where}[{i}]")
    elif actual != expected:
        yield f"{where} is {actual!r}, the reference's {expected!r}"


def _far(actual: Any, expected: Near, where: str) -> Iterator[str]:
    values = np.asarray(expected.values, np.float64)
    numbers = np.asarray(actual, np.float64)
    if numbers.shape != values.shape:
        yield f"{where} is of shape {numbers.shape}, the reference's {values.shape}"
        return
    over = ~(np.abs(numbers - values) <= np.broadcast_to(expected.bounds, values.shape))
    if over.any():
        at = tuple(int(i) for i in np.argwhere(over)[0])
        place = where + "".join(f"[{i}]" for i in at)
        yield f"{place} is {numbers[at]:.9g}, the reference's {values[at]:.9g}"
