"""Label names and ids: the data set's own, and which of the model's each one is."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from optimizer.foundation.errors import DataError, closest
from optimizer.foundation.progress import say
from optimizer.recipe.schema import DataSpec

UNNAMED = re.compile(r"LABEL_\d+")  # what transformers calls the labels of a model that names none


def normal(text: str) -> str:
    """Texts and names are the same when they are after NFKC, case folding and white space."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def names_of(
    spec: DataSpec, features: Mapping[str, Any], columns: Mapping[str, str], where: str
) -> tuple[str, ...]:
    """Label names in id order: the spec's, or those the data set declares; () when neither does.

    Raises DataError when both give the same names in another order.
    """
    declared: tuple[str, ...] = ()
    for field in ("label", "tags"):
        feature = features.get(columns.get(field, ""))
        feature = getattr(feature, "feature", feature)
        declared = declared or tuple(getattr(feature, "names", None) or ())
    if spec.labels and spec.labels != declared and sorted(spec.labels) == sorted(declared):
        raise DataError(
            f"the ids of this data set mean {list(declared)}, in this order",
            where=f"{where}: labels",
            fix="Leave labels out: the data set names its ids itself.",
        )
    return spec.labels or declared


def label_id(value: Any, names: Sequence[str], where: str) -> int:
    """The id of a label given as an id or as one of `names`. Raises DataError for anything else:
    other names, lists, fractions, NaN, ids out of range."""
    if isinstance(value, str):
        if value in names:
            return names.index(value)
        raise DataError(
            f"{value!r} is not among the labels{closest(value, list(names))}",
            where=where,
            accepted=", ".join(names) or "ids; names need `labels:` in id order",
            fix="Give the label names in id order, e.g. labels: [negative, positive].",
        )
    whole = isinstance(value, int | float) and float(value).is_integer()
    if not whole or value < 0 or (names and value >= len(names)):
        raise DataError(
            f"{str(value)[:80]} is not a label id",
            where=where,
            accepted=f"0..{len(names) - 1}" if names else "whole numbers from 0",
        )
    return int(value)


def ids_in_model(names: Sequence[str], labels: Sequence[str], where: str) -> list[int]:
    """For each id of the data set, whose label names are `names`, the id of the same label in the
    model, whose label names are `labels`.

    Names are matched as `normal` has them. Without names, or when the model names none (LABEL_0,
    ...), an id means the same to both. Raises DataError when the names are not the same set.
    """
    same = list(range(len(labels)))
    if not names or list(names) == list(labels):
        return same
    if len(names) == len(labels) and all(map(UNNAMED.fullmatch, labels)):
        say(f"{where}: the model names no label; its outputs are taken for {', '.join(names)}")
        return same
    place = {normal(label): i for i, label in enumerate(labels)}
    keys = [normal(name) for name in names]
    if len(place) < len(labels) or len(set(keys)) < len(names):  # case is all that differs
        place = {label: i for i, label in enumerate(labels)}
        keys = list(names)
    if set(keys) != set(place):
        raise DataError(
            f"the labels of the data are {list(names)}, those of the model {list(labels)}",
            where=f"{where}: labels",
            accepted="the same names, in the order of the data's own ids",
            fix="Without labels, ids in the data are taken to be the model's.",
        )
    return [place[name] for name in keys]
