"""Read a data set's label names and ids, and match them to the model's."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from optimizer.foundation.errors import DataError, suggest
from optimizer.foundation.progress import say
from optimizer.recipe.schema import DataSpec

TEXTS = ("string", "large_string")  # types of a column; datasets reads a csv as the second
UNNAMED = re.compile(r"LABEL_\d+")  # transformers' names for the labels of a model without names


def normalize_text(text: str) -> str:
    """Return a label's `text` after NFKC, case folding and collapsing white space, for comparison
    of data set and model."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def read_names(
    spec: DataSpec, features: Mapping[str, Any], columns: Mapping[str, str], where: str
) -> tuple[str, ...]:
    """Return the label names in id order: the spec's, else those that the data set declares, else
    (). Raises DataError where both have the same names in another order.

    features: {column: type} of the table
    columns: {field: column} of the spec
    """
    declared: tuple[str, ...] = ()
    for field in ("label", "labels", "tags"):
        feature = features.get(columns.get(field, ""))
        feature = getattr(feature, "feature", feature)
        declared = declared or tuple(getattr(feature, "names", None) or ())
    if spec.labels and spec.labels != declared and sorted(spec.labels) == sorted(declared):
        raise DataError(
            f"labels has another order than the names in the data set, {list(declared)}",
            where=f"{where}: labels",
            fix="Remove labels: the data set names its ids.",
        )
    return spec.labels or declared


def collect_names(spec: DataSpec, table: Any, columns: Mapping[str, str]) -> tuple[str, ...]:
    """Return the distinct label names in a column of texts, in alphabetical order; () where labels
    are ids.

    table: rows, from tables.open_table
    columns: {field: column}
    """
    for field in [f for f in ("label", "labels", "tags") if f in columns]:
        feature = table.features[columns[field]]
        if getattr(getattr(feature, "feature", feature), "dtype", "") not in TEXTS:
            continue
        values = [c for c in table[columns[field]] if c is not None]
        if field == "labels" and not hasattr(feature, "feature"):
            values = [
                [p.strip() for p in c.split(spec.label_separator) if p.strip()] for c in values
            ]
        names = {n for c in values for n in ([c] if isinstance(c, str) else c) if n is not None}
        ids = field == "labels" and all(name.isdecimal() for name in names)
        return () if ids else tuple(sorted(names))
    return ()


def label_id(value: Any, names: Sequence[str], where: str) -> int:
    """Return the id of a data set's label that is given as an id or as one of `names`. Raises
    DataError for any other value."""
    if isinstance(value, str):
        if value in names:
            return names.index(value)
        raise DataError(
            f"{value!r} is not among the labels{suggest(value, list(names))}",
            where=where,
            accepted=", ".join(names) or "ids; names need `labels:` in id order",
            fix="Set the label names in id order, e.g. labels: [negative, positive].",
        )
    is_integer = isinstance(value, int | float) and float(value).is_integer()
    if not is_integer or value < 0 or (names and value >= len(names)):
        raise DataError(
            f"{str(value)[:80]} is not a label id",
            where=where,
            accepted=f"0..{len(names) - 1}" if names else "whole numbers from 0",
        )
    return int(value)


def label_ids(value: Any, names: Sequence[str], separator: str, where: str) -> tuple[int, ...]:
    """Return the ids, ascending, of several labels of a data set's row.

    value: a list of ids or names, or a text of names with `separator` between them
    where: the row, for messages

    Raises DataError for any other value, and for a label listed twice.
    """
    if isinstance(value, str):
        value = [part.strip() for part in value.split(separator) if part.strip()]
        if not names and all(part.isdecimal() for part in value):
            value = [int(part) for part in value]
    if not isinstance(value, list):
        raise DataError(
            f"{str(value)[:80]} is not a list",
            where=where,
            accepted=f"a list of labels, or a text of labels separated by {separator!r} "
            "(label_separator)",
            fix="A column of one label per row is the field label.",
        )
    ids = sorted(label_id(one, names, where) for one in value)
    if len(set(ids)) < len(ids):
        raise DataError(
            f"{str(value)[:80]} has a label twice",
            where=where,
            accepted="the ids or names of the labels that the row has",
            fix="Of a list with a 0 or 1 for each label give the names of those with a 1.",
        )
    return tuple(ids)


def map_ids(names: Sequence[str], labels: Sequence[str], where: str) -> list[int]:
    """Return the model's label id for each label id of the data set.

    names: the data set's label names in id order, compared after `normalize_text`; (): ids stay
        unchanged
    labels: the model's label names; with LABEL_0, ... ids stay unchanged

    Raises DataError when the names are not the same set.
    """
    same = list(range(len(labels)))
    if not names or list(names) == list(labels):
        return same
    if len(names) == len(labels) and all(map(UNNAMED.fullmatch, labels)):
        say(f"{where}: the model has no label names; its outputs are read as {', '.join(names)}")
        return same
    place = {normalize_text(label): i for i, label in enumerate(labels)}
    keys = [normalize_text(name) for name in names]
    if len(place) < len(labels) or len(set(keys)) < len(names):  # some differ only in case
        place = {label: i for i, label in enumerate(labels)}
        keys = list(names)
    if set(keys) != set(place):
        raise DataError(
            f"the data's labels are {list(names)}, but the model's are {list(labels)}",
            where=f"{where}: labels",
            accepted="the model's names, in the order of the data's ids",
            fix="Correct labels (of zero-shot classification model.zero_shot.candidate_labels), or "
            "remove it if the data's ids are the model's.",
        )
    return [place[name] for name in keys]


def map_names(names: Sequence[str], labels: Sequence[str], where: str) -> list[int]:
    """Return the model's label id for each of `names`. The data may lack some of the model's
    labels.

    names: names in the data, compared after `normalize_text`
    labels: the model's label names; () for a model without any

    Raises DataError for a name that matches none or several labels.
    """
    ids: dict[str, list[int]] = {}
    for i, label in enumerate(labels):
        ids.setdefault(normalize_text(label), []).append(i)
    exact = {label: [i] for i, label in enumerate(labels)}
    matches = [exact.get(name) or ids.get(normalize_text(name), []) for name in names]
    for name, candidates in zip(names, matches, strict=True):
        if len(candidates) != 1:
            known = f"the model's are {list(labels)}" if labels else "the model has no labels"
            raise DataError(
                f"the data have label {name!r}, and {known}{suggest(name, list(labels))}",
                where=f"{where}: labels",
                accepted="names of the model's labels; ids; other names with labels: in id order",
                fix="Set the label names in id order, e.g. labels: [negative, positive].",
            )
    return [candidates[0] for candidates in matches]
