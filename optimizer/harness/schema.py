"""Schema checks for documents from outside: one check per field, combined into tables.

    ENGINE = record({"target": text(200), "threads": whole(0, 1024), "model": file_name})
    ENGINE(document, "manifest.json: engines[0]")

A check takes a value and its location, and raises BundleError with the field, the value and the
accepted values. It changes nothing and fills in no defaults. (The harness has no pydantic.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from .errors import BundleError
from .trust.verify import name_problem

Check = Callable[[Any, str], None]
MOST = 100_000  # default limit of the entries of a list or an object
SHOWN = 60  # maximum characters of a value in a message


def refuse(value: Any, where: str, accepted: str) -> None:
    """Refuse a value in a bundle's JSON: raise BundleError naming `value`, shortened, its place
    `where` and the `accepted` values."""
    shown = "null" if value is None else repr(value)
    if len(shown) > SHOWN:
        shown = f"{shown[:SHOWN]}..."
    raise BundleError(f"{shown} was found", where=where, accepted=accepted)


def text(most: int = 1000, pattern: str = "", accepted: str = "") -> Check:
    """Return a check for a field of a bundle's JSON: a string of at most `most` characters that
    matches `pattern` fully."""
    takes = accepted or f"a text of up to {most:,} characters"

    def check(value: Any, where: str) -> None:
        fits = isinstance(value, str) and len(value) <= most
        if not fits or (pattern and not re.fullmatch(pattern, value)):
            refuse(value, where, takes)

    return check


def choice(*names: str) -> Check:
    """Return a check for a field of a bundle's JSON: a string that is one of `names`."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, str) or value not in names:
            refuse(value, where, ", ".join(names))

    return check


def whole(low: int, high: int) -> Check:
    """Return a check for a field of a bundle's JSON: a whole number from `low` to `high`; true and
    false are refused."""

    def check(value: Any, where: str) -> None:
        plain = isinstance(value, int) and not isinstance(value, bool)
        if not plain or not low <= value <= high:
            refuse(value, where, f"a whole number from {low:,} to {high:,}")

    return check


def number(low: float, high: float) -> Check:
    """Return a check for a field of a bundle's JSON: a number from `low` to `high`; NaN, true and
    false are refused."""

    def check(value: Any, where: str) -> None:
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        if not plain or not low <= value <= high:
            refuse(value, where, f"a number from {low:g} to {high:g}")

    return check


def float_number(value: Any, where: str) -> None:
    """Check a field of a bundle's JSON: refuse a value that is not a number. NaN and infinity are
    numbers; true and false are not."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        refuse(value, where, "a number")


def flag(value: Any, where: str) -> None:
    """Raise an error for a field of a bundle's JSON whose value is not true or false."""
    if not isinstance(value, bool):
        refuse(value, where, "true or false")


def anything(value: Any, where: str) -> None:
    """Accept any value of a field of a bundle's JSON that only people read."""
    del value, where


def file_name(value: Any, where: str) -> None:
    """Check a field of a bundle's JSON: refuse a value that is not a file name below the bundle's
    folder."""
    why = name_problem(value)
    if why:
        raise BundleError(
            f"file {value!r:.200} {why}", where=where, accepted="a name below the bundle's folder"
        )


def null_or(check: Check) -> Check:
    """Return a check for a field of a bundle's JSON: null, or a value that `check` accepts."""

    def either(value: Any, where: str) -> None:
        if value is not None:
            check(value, where)

    return either


def one_of(*checks: Check) -> Check:
    """Return a check for a field of a bundle's JSON that any of `checks` accepts; it raises the
    last check's error."""

    def any_of(value: Any, where: str) -> None:
        for check in checks[:-1]:
            try:
                return check(value, where)
            except BundleError:
                continue
        return checks[-1](value, where)

    return any_of


def list_of(check: Check, least: int = 0, most: int = MOST) -> Check:
    """Return a check for a field of a bundle's JSON: a list of `least` to `most` entries, each
    accepted by `check`."""

    def each(value: Any, where: str) -> None:
        if not isinstance(value, list | tuple) or not least <= len(value) <= most:
            refuse(value, where, f"a list of {least:,} to {most:,} entries")
        for i, entry in enumerate(value):
            check(entry, f"{where}[{i}]")

    return each


def map_of(check: Check, least: int = 0, key: Check | None = None) -> Check:
    """Return a check for a field of a bundle's JSON: an object of `least` entries or more. check:
    of each value; key: keys."""

    def each(value: Any, where: str) -> None:
        if not isinstance(value, Mapping) or not least <= len(value) <= MOST:
            refuse(value, where, f"an object of {least:,} to {MOST:,} entries")
        for name, entry in value.items():
            if key is not None:
                key(name, where)
            check(entry, f"{where}[{name!r}]")

    return each


def record(
    fields: Mapping[str, Check], optional: Mapping[str, Check] | None = None, closed: bool = False
) -> Check:
    """Return a check for a part of a bundle's JSON: an object with all `fields`, any `optional`.
    closed: refuse other keys."""
    every = {**fields, **(optional or {})}

    def check(value: Any, where: str) -> None:
        if not isinstance(value, Mapping):
            refuse(value, where, "an object")
        prefix = f"{where}." if where and not where.endswith(": ") else where
        for name in fields:
            if name not in value:
                raise BundleError("the field is missing", where=f"{prefix}{name}")
        for name, entry in value.items():
            if name in every:
                every[name](entry, f"{prefix}{name}")
            elif closed:
                raise BundleError(
                    "unknown field", where=f"{prefix}{name!s:.60}", accepted=", ".join(every)
                )

    return check
