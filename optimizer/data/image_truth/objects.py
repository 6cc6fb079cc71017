"""Read the objects of an image from a column: labelled boxes, as COCO and `datasets` have them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from optimizer.data.labels import normalize_text
from optimizer.foundation.errors import DataError, suggest

BOXES, LABELS = ("bbox", "box"), ("category", "category_id", "label")
ACCEPTED = (
    "a list of {bbox: [left, top, width, height], category: a name or an id}, or an object with "
    "the lists bbox and category"
)


@dataclass(frozen=True)
class Labelled:
    """Right object of an image in a labelled data set.

    label: name or id in the data; after `map_to_model` the model's label id
    box: left, top, width and height in pixels
    crowd: True for COCO's iscrowd, a group that metrics leave out
    """

    label: str | int
    box: tuple[float, float, float, float]
    crowd: bool = False


def read_objects(value: Any, where: str) -> tuple[Labelled, ...]:
    """Read the right objects of an image from a column's value; () for an image without any.

    where: the row, for messages

    Raises DataError for any other value.
    """
    each = enumerate(read_annotations(value, where, ACCEPTED, "objects"))
    return tuple(_object(one, f"{where}[{i}]") for i, one in each)


def read_annotations(value: Any, where: str, accepted: str, noun: str) -> list[Mapping[str, Any]]:
    """Return the annotations in a column's value, one mapping per object.

    value: a list of objects, or an object with lists of one length
    where: the row, for messages
    accepted: accepted form of a value, for messages
    noun: name of an annotation, for messages

    Raises DataError for any other value.
    """
    if isinstance(value, Mapping):
        columns = {name: values for name, values in value.items() if isinstance(values, list)}
        counts = {len(values) for values in columns.values()}
        if len(counts) > 1 or not columns:
            raise DataError(
                f"{str(value)[:80]} has no lists of one length", where=where, accepted=accepted
            )
        rows = zip(*columns.values(), strict=True)
        value = [dict(zip(columns, values, strict=True)) for values in rows]
    if not isinstance(value, list) or not all(isinstance(one, Mapping) for one in value):
        raise DataError(
            f"{str(value)[:80]} is not a list of {noun}", where=where, accepted=accepted
        )
    return value


def read_box(
    fields: Mapping[str, Any], where: str, accepted: str
) -> tuple[float, float, float, float]:
    """Read left, top, width and height of an annotation's box in a data set. Raises DataError for
    other values."""
    box = next((fields[name] for name in BOXES if fields.get(name) is not None), None)
    if not isinstance(box, Sequence) or len(box) != 4 or not all(map(number, box)):
        raise DataError(f"{str(box)[:80]} is not a box", where=where, accepted=accepted)
    if min(box[2:]) < 0:
        raise DataError(
            f"the box {list(box)} has a side below 0",
            where=where,
            accepted=accepted,
            fix="Boxes of two corners become [left, top, right - left, bottom - top].",
        )
    left, top, width, height = map(float, box)
    return left, top, width, height


def _object(fields: Mapping[str, Any], where: str) -> Labelled:
    box = read_box(fields, where, ACCEPTED)
    label = next((fields[name] for name in LABELS if fields.get(name) is not None), None)
    if isinstance(label, bool) or not isinstance(label, str | int):
        raise DataError(f"{str(label)[:80]} is not a label", where=where, accepted=ACCEPTED)
    return Labelled(label, box, bool(fields.get("iscrowd")))


def number(value: Any) -> bool:
    """Return True for a value of a data set's annotation that is a finite number."""
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return known and math.isfinite(value)


def map_to_model(
    objects: Sequence[Labelled], names: Sequence[str], labels: Sequence[str], where: str
) -> tuple[Labelled, ...]:
    """Return `objects` with the model's label ids. Raises DataError for a label that the model
    lacks.

    names: the data set's label names in id order; (): ids of the data are the model's
    labels: the model's label names
    """
    known = [normalize_text(label) for label in labels]
    ids = {name: i for i, name in enumerate(known) if known.count(name) == 1}
    changed = []
    for one in objects:
        label = one.label
        if isinstance(label, int) and names and 0 <= label < len(names):
            label = names[label]
        if isinstance(label, str):
            label = ids.get(normalize_text(label), -1)
        if not 0 <= label < len(labels):
            raise DataError(
                f"an object has the label {one.label!r}" + suggest(str(one.label), list(labels)),
                where=f"{where}: columns.objects",
                accepted=f"names or ids 0..{len(labels) - 1} of the model's labels: "
                + ", ".join(labels[:20]),
                fix="Give the names of ids of the data in order: labels: [...].",
            )
        changed.append(replace(one, label=label))
    return tuple(changed)
