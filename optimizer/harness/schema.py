"""What a document that comes from outside may hold: a check per field, put together into tables.

    ENGINE = record({"target": text(200), "threads": whole(0, 1024), "model": file_name})
    ENGINE(document, "manifest.json: engines[0]")

A check takes a value and what to call it, and raises BundleError that names the field, what was
found and what is accepted. It changes nothing and fills in nothing. (The harness has no pydantic.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from .errors import BundleError
from .trust.verify import name_problem

Check = Callable[[Any, str], None]
MOST = 100_000  # entries of a list or a mapping, unless it says otherwise
SHOWN = 60  # characters of a value in a message


def refuse(value: Any, where: str, accepted: str) -> None:
    """Raises BundleError."""
    shown = "null" if value is None else repr(value)
    if len(shown) > SHOWN:
        shown = f"{shown[:SHOWN]}..."
    raise BundleError(f"{shown} was found", where=where, accepted=accepted)


def text(most: int = 1000, pattern: str = "", accepted: str = "") -> Check:
    """A string of at most `most` characters that the whole of `pattern` matches."""
    takes = accepted or f"a text of up to {most:,} characters"

    def check(value: Any, where: str) -> None:
        fits = isinstance(value, str) and len(value) <= most
        if not fits or (pattern and not re.fullmatch(pattern, value)):
            refuse(value, where, takes)

    return check


def choice(*names: str) -> Check:
    """One of these strings."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, str) or value not in names:
            refuse(value, where, ", ".join(names))

    return check


def whole(low: int, high: int) -> Check:
    """A whole number from `low` to `high`; true and false are none."""

    def check(value: Any, where: str) -> None:
        plain = isinstance(value, int) and not isinstance(value, bool)
        if not plain or not low <= value <= high:
            refuse(value, where, f"a whole number from {low:,} to {high:,}")

    return check


def number(low: float, high: float) -> Check:
    """A finite number from `low` to `high`."""

    def check(value: Any, where: str) -> None:
        plain = isinstance(value, int | float) and not isinstance(value, bool)
        if not plain or not low <= value <= high:
            refuse(value, where, f"a number from {low:g} to {high:g}")

    return check


def float_number(value: Any, where: str) -> None:
    """Any number, as a measurement gave it: NaN and infinity too."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        refuse(value, where, "a number")


def flag(value: Any, where: str) -> None:
    """true or false."""
    if not isinstance(value, bool):
        refuse(value, where, "true or false")


def anything(value: Any, where: str) -> None:
    """A field that only people read."""
    del value, where


def file_name(value: Any, where: str) -> None:
    """A name below the bundle's folder."""
    why = name_problem(value)
    if why:
        raise BundleError(
            f"file {value!r:.200} {why}", where=where, accepted="a name below the bundle's folder"
        )


def null_or(check: Check) -> Check:
    """null, or what the other takes."""

    def either(value: Any, where: str) -> None:
        if value is not None:
            check(value, where)

    return either


def one_of(*checks: Check) -> Check:
    """What any of these takes; the last one's complaint is raised."""

    def any_of(value: Any, where: str) -> None:
        for check in checks[:-1]:
            try:
                return check(value, where)
            except BundleError:
                continue
        return checks[-1](value, where)

    return any_of


def list_of(check: Check, least: int = 0, most: int = MOST) -> Check:
    """A list of `least` to `most` entries."""

    def each(value: Any, where: str) -> None:
        if not isinstance(value, list | tuple) or not least <= len(value) <= most:
            refuse(value, where, f"a list of {least:,} to {most:,} entries")
        for i, entry in enumerate(value):
            check(entry, f"{where}[{i}]")

    return each


def map_of(check: Check, least: int = 0, key: Check | None = None) -> Check:
    """An object whose keys are names. key: a check of each of them."""

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
    """An object that has every one of `fields`, and may have the `optional` ones. closed: and no
    other."""
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
                    "no such field", where=f"{prefix}{name!s:.60}", accepted=", ".join(every)
                )

    return check
