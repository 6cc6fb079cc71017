"""Read the samples of a data spec, the same rows on every machine, and batch them.

read_samples     rows of a spec encode_batches   padded batches of rows cut_windows      rows joined
and cut into pieces of equal length, for text-generation
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from optimizer.data import arrays, conversations
from optimizer.data.answers import read_answers
from optimizer.data.image_truth.objects import map_to_model, read_objects
from optimizer.data.image_truth.poses import check_count, read_poses
from optimizer.data.labels import (
    collect_names,
    label_id,
    label_ids,
    map_ids,
    map_names,
    read_names,
)
from optimizer.data.pictures import disable_decoding, read_picture
from optimizer.data.same_rows import drop_repeated
from optimizer.data.sample import Sample as Sample
from optimizer.data.tables import (
    describe_place,
    is_local,
    list_files,
    list_folder_files,
    open_table,
)
from optimizer.foundation.errors import DataError, suggest
from optimizer.foundation.progress import say
from optimizer.foundation.reading import reading
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.tasks import Batch, Task, encode, fill_mask
from optimizer.recipe.schema import Calibrate, DataSpec

Window = npt.NDArray[np.int64]
FIELDS = (
    *("text", "text_pair", "image", "messages", "arrays"),
    *("label", "labels", "score", "tags", "answers", "objects"),
    *("keypoints", "mask", "depth"),
)
INPUTS = ("text", "image", "messages", "arrays")
PICTURES = ("mask", "depth")
"""Fields of a map beside an image, read as images are."""
TAGS = "Give tags as a list with one tag per word, and text as a list of words."
CHECKED = 256  # maximum rows of a data set that check_header reads


def read_samples(spec: DataSpec, limit: int | None = None, seed: int | None = None) -> list[Sample]:
    """Return the rows of a spec in the data set's order, without rows that have a null, an empty
    text or the input of an earlier row. Texts are compared by characters; same_rows.py compares
    token ids.

    spec.samples rows are drawn with spec.seed, and of those `limit` with `seed` (None: spec.seed).
    The draw is by hash of the row's position, so that a smaller draw is a subset of a larger one
    and does not depend on a library's random generator. Raises DataError for a missing file or
    column, no rows, and labels that are not ids or names.
    """
    rows = list(_read(spec).rows)
    rows = _draw(rows, spec.samples, spec.seed, describe_place(spec))
    return _draw(rows, limit, spec.seed if seed is None else seed, describe_place(spec))


def read_calibration_rows(calibrate: Calibrate, task: Task) -> list[Sample]:
    """Return the rows of calibrate.data: a draw of calibrate.samples rows or, for text-generation,
    all rows, because their texts are joined and cut into windows."""
    count = calibrate.samples if task.calibration_items == "rows" else None
    return read_samples(calibrate.data, count, calibrate.seed)


def check_header(spec: DataSpec) -> None:
    """Check the columns' names and types and the first CHECKED rows of a data set, and raise the
    DataError that reading all rows would raise: a missing column, a label that is not an id, a text
    that is not a string. Data on a hub are not fetched, and not checked."""
    if not is_local(spec):
        return
    table, columns, names, _ = _open(spec)

    def listed(field: str) -> bool:
        return hasattr(table.features[columns[field]], "feature")

    if "tags" in columns and not (listed("tags") and listed("text")):
        raise DataError(
            "columns tags and text are not both lists",
            where=f"{describe_place(spec)}: columns.tags",
            fix=TAGS,
        )
    for _ in islice(_parse_rows(spec, table, columns, names), CHECKED):
        pass


def check_rows(spec: DataSpec) -> None:
    """Read all rows of a data set, which read_samples then finds read, and raise its DataError.
    Data on a hub are not fetched, and not checked."""
    if is_local(spec):
        _read(spec)


def _open(spec: DataSpec) -> tuple[Any, dict[str, str], tuple[str, ...], bool]:
    """Open the table of a spec; return (table, {field: column}, label names in id order, False
    where these were collected from the values). Raises DataError for wrong columns."""
    table = open_table(spec)
    columns = _columns(spec, table)
    ordered = read_names(spec, table.features, columns, describe_place(spec))
    names = ordered or collect_names(spec, table, columns)
    return table, columns, names, names == ordered


def _draw(rows: list[Sample], count: int | None, seed: int, where: str) -> list[Sample]:
    if count is None or count == len(rows):
        return rows
    if count > len(rows):
        say(f"{where}: samples is {count}, but the data have {len(rows)} rows: all are used")
        return rows

    def rank(i: int) -> bytes:
        return hashlib.sha256(f"{seed}:{i}".encode()).digest()

    return [rows[i] for i in sorted(sorted(range(len(rows)), key=rank)[:count])]


def digest_rows(spec: DataSpec) -> str:
    """Return the sha256 of the rows that `read_samples` returns for the spec, as canonical JSON
    lines."""
    h = hashlib.sha256()
    for sample in read_samples(spec):
        line = json.dumps(sample.as_row(), sort_keys=True, ensure_ascii=False)
        h.update(line.encode() + b"\n")
    return h.hexdigest()


def _has_label(row: Sample) -> bool:
    return any(value is not None for value in (row.label, row.labels, row.tags))


def map_labels(
    rows: Sequence[Sample], spec: DataSpec, labels: Sequence[str] | None
) -> list[Sample]:
    """Return `rows` of `spec` with label and tag ids converted to the model's.

    labels: the contract's label names; None: the model has no labels, and rows stay unchanged

    Labels are matched by name (labels.map_ids). Raises DataError when the data's names or an id are
    not among the model's, and for names without an order where the model has none.
    """
    where = describe_place(spec)
    check_count([pose for r in rows for pose in r.keypoints or ()], labels or (), where)
    if any(r.objects is not None for r in rows):
        names = spec.labels
        return [
            replace(r, objects=map_to_model(r.objects or (), names, labels or (), where))
            for r in rows
        ]
    if not any(_has_label(r) for r in rows):
        return list(rows)
    read = _read(spec)
    if read.ordered and labels is None:
        return list(rows)
    labels = labels or ()
    match = map_ids if read.ordered else map_names
    ids = match(read.names, labels, where)

    def of_model(i: int) -> int:
        if i >= len(ids):
            raise DataError(
                f"label id {i} was found, but the model has {len(ids)} labels",
                where=where,
                accepted=f"0..{len(ids) - 1}: {', '.join(labels)}",
                fix="Set labels: [...] to the names of the data's ids, in order.",
            )
        return ids[i]

    return [
        replace(
            r,
            label=None if r.label is None else of_model(r.label),
            labels=None if r.labels is None else tuple(sorted(map(of_model, r.labels))),
            tags=None if r.tags is None else tuple(map(of_model, r.tags)),
        )
        for r in rows
    ]


def sort_by_size(rows: Sequence[Sample], task: Task) -> list[Sample]:
    """Return a data set's rows ordered by size, so that batches have little padding."""
    extent = task.inputs.extent
    return sorted(rows, key=lambda r: extent(r.input) + extent(r.text_pair or ""))


def encode_batches(
    rows: Sequence[Sample], contract: Contract, encoder: Any, batch_size: int, sequence_length: int
) -> Iterator[Batch]:
    """Yield the model's input arrays for a data set's `rows`, in order, in batches of batch_size
    rows. The harness encodes them. A batch of texts is padded to its longest text, which is cut to
    `sequence_length` tokens and to the contract's max_length."""
    sequence_length = min(sequence_length, tasks.longest(contract))
    sized = bool(tasks.look_up(contract).inputs.size)
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        inputs = [s.input for s in part]
        pairs = [s.text_pair for s in part]
        batch = encode(contract, encoder, inputs, pairs)
        if sized and batch.real.shape[1] > sequence_length:
            batch = encode(contract, encoder, inputs, pairs, sequence_length)
        if tasks.look_up(contract).fills:  # masks, as the model will read them
            batch = fill_mask.mask_tokens(contract, batch)[0]
        yield batch


def cut_windows(
    rows: Sequence[Sample], tokenizer: Any, contract: Contract, sequence_length: int
) -> list[Window]:
    """Cut the texts of `rows`, in order, into windows of `sequence_length` token ids each, int64.

    The texts are tokenized without special tokens, joined by the first of the contract's eos_ids,
    and cut; a shorter remainder is dropped. Conversations are rendered by the chat template, which
    writes their special tokens, and joined without a token between them.

    tokenizer: result of inputs.text.load_tokenizer

    Raises DataError for less than one window, or a window longer than the model's context.
    """
    about = contract.decoder
    if not 2 <= sequence_length <= about.context:
        raise DataError(
            f"windows have {sequence_length} tokens, but the model takes {about.context}",
            where="sequence_length",
            accepted=f"2..{about.context}",
        )
    rows = conversations.render(rows, contract, tokenizer)
    ids: list[int] = []
    for row, text in zip(rows, tokenizer.ids([s.text for s in rows]), strict=True):
        ids += ([about.eos_ids[0]] if ids and row.messages is None else []) + text
    if len(ids) < sequence_length:
        characters = sum(len(s.text) for s in rows)
        needed = math.ceil(characters * sequence_length / max(len(ids), 1))
        raise DataError(
            f"{len(rows)} texts have {len(ids)} tokens, but one window needs {sequence_length}",
            where=f"{contract.task} data",
            accepted=f"about {needed} characters or more for each window (there are {characters})",
            fix="Use more text, or a smaller sequence_length.",
        )
    trimmed = np.array(ids[: len(ids) // sequence_length * sequence_length], dtype=np.int64)
    return list(trimmed.reshape(-1, sequence_length))


def pick_input(row: Sample, task: Task) -> Any:
    """Return the input that stands for a data set's row where the model gets no pairs: its text or
    image; for question answering the context, which is longer than the question."""
    return row.text_pair if task.extracts and row.text_pair else row.input


def _fingerprint(spec: DataSpec) -> str:
    """Return JSON of [path, bytes, modification time] of each local file, part of the cache key of
    _load."""
    paths = list_files(spec) or (list_folder_files(spec) if is_local(spec) else [])
    with reading(describe_place(spec), error=DataError):
        states = [(str(p), p.stat()) for p in paths]
    return json.dumps([[name, state.st_size, state.st_mtime_ns] for name, state in states])


@dataclass(frozen=True)
class _UsableRows:
    """All usable rows of a spec, with its label names in id order.

    ordered: False where the names were collected from the values and sorted alphabetically
    """

    rows: tuple[Sample, ...]
    names: tuple[str, ...]
    ordered: bool


def _read(spec: DataSpec) -> _UsableRows:
    return _load(spec.model_dump_json(), spec.base, _fingerprint(spec))


@lru_cache(maxsize=16)
def _load(spec_json: str, base: str, _fingerprint: str) -> _UsableRows:
    """Read all usable rows of a spec, cached so that a stage's key and its run read them once.

    spec_json: the spec as JSON
    base: folder of relative paths in the spec
    _fingerprint: state of the local files, so that a changed file is read again
    """
    spec = DataSpec.model_validate_json(spec_json).model_copy(update={"base": base})
    table, columns, names, ordered = _open(spec)
    rows = list(_parse_rows(spec, table, columns, names))
    parsed = [row for row in rows if row is not None]
    dropped = len(rows) - len(parsed)
    if dropped:
        say(
            f"{describe_place(spec)}: {dropped} of {len(table)} rows dropped: "
            "a value is null or empty"
        )
    if not parsed:
        raise DataError(
            f"none of {len(table)} rows is usable",
            where=describe_place(spec),
            fix="Check split and columns; a row needs an image, or a non-empty text.",
        )
    return _UsableRows(tuple(drop_repeated(parsed, describe_place(spec))), names, ordered)


def _parse_rows(
    spec: DataSpec, table: Any, columns: Mapping[str, str], names: tuple[str, ...]
) -> Iterator[Sample | None]:
    """Yield a Sample for each row of `table` in order; None for a row with a null or empty text, or
    without a box in which to look for keypoints.

    columns: {field: column}
    names: label names in id order
    """
    for field in [f for f in ("image", *PICTURES) if f in columns]:
        table = disable_decoding(table, columns[field])
    for i, row in enumerate(_rows_of(table, describe_place(spec))):
        values = {f: row[column] for f, column in columns.items() if f != "arrays"}
        if "arrays" in columns:
            chosen = arrays.list_columns(columns["arrays"], columns, table.column_names)
            values["arrays"] = {name: row[name] for name in chosen}
        if spec.source == "csv" and values.get("labels", "") is None:
            values["labels"] = []  # an empty field
        if spec.source == "csv" and values.get("answers", "") is None:
            values["answers"] = []
        sample = _sample(values, names, spec, i) if _usable(values) else None
        yield None if sample is not None and sample.boxes == () else sample


def _rows_of(table: Any, where: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a data set's table. Strings are decoded here, so invalid UTF-8 is found
    only now."""
    with reading(where, error=DataError):
        yield from table


def _columns(spec: DataSpec, table: Any) -> dict[str, str]:
    """Return {field: column} of the spec. Raises DataError for an unknown field or column, and
    unless exactly one kind of input has a column."""
    unknown = [f for f in spec.columns if f not in FIELDS]
    if unknown:
        raise DataError(
            f"unknown field {unknown[0]!r}{suggest(unknown[0], list(FIELDS))}",
            where=f"{describe_place(spec)}: columns",
            accepted=", ".join(FIELDS),
        )
    inputs = [f for f in INPUTS if f in spec.columns]
    if len(inputs) != 1:
        raise DataError(
            f"both {inputs[0]} and {inputs[1]} have a column"
            if inputs
            else f"none of {', '.join(INPUTS)} has a column",
            where=f"{describe_place(spec)}: columns",
            accepted=f"one of {', '.join(INPUTS)}: one of {', '.join(table.column_names)}",
        )
    for field, column in spec.columns.items():
        if column not in table.column_names and (field, column) != ("arrays", arrays.ALL):
            raise DataError(
                f"no column {column!r} (for {field}){suggest(column, table.column_names)}",
                where=f"{describe_place(spec)}: columns.{field}",
                accepted=", ".join(table.column_names),
            )
    return dict(spec.columns)


def _sample(
    values: Mapping[str, Any], names: tuple[str, ...], spec: DataSpec, index: int
) -> Sample:
    """Build the Sample of a row of a table from its values.

    values: {field: value}
    names: label names in id order
    index: row number in the data set, for messages
    """
    row = f"{describe_place(spec)}: row {index}"
    text, pair, tags = values.get("text", ""), values.get("text_pair"), values.get("tags")
    image, score, messages = values.get("image"), values.get("score"), None
    if "messages" in values:
        messages = conversations.parse(values["messages"], f"{row}: messages")
        text = conversations.join_messages(messages)
    words = None
    if isinstance(text, list):
        words = tuple(_text(word, f"{row}: text") for word in text)
    matching = isinstance(tags, list) and words is not None and len(tags) == len(words)
    if tags is not None and not matching:
        raise DataError(
            "tags and words are not two lists of equal length", where=f"{row}: tags", fix=TAGS
        )
    return Sample(
        text=_text(text, f"{row}: text") if words is None else " ".join(words),
        text_pair=None if pair is None else _text(pair, f"{row}: text_pair"),
        label=label_id(values["label"], names, f"{row}: label") if "label" in values else None,
        labels=label_ids(values["labels"], names, spec.label_separator, f"{row}: labels")
        if "labels" in values
        else None,
        score=None if isinstance(score, list | None) else _score(score, f"{row}: score"),
        scores=tuple(_score(s, f"{row}: score") for s in score)
        if isinstance(score, list)
        else None,
        words=words,
        tags=None if tags is None else tuple(label_id(t, names, f"{row}: tags") for t in tags),
        image=None if image is None else read_picture(image, spec.base, f"{row}: image"),
        messages=messages,
        arrays=arrays.read_row(values["arrays"], row, alone=spec.columns["arrays"] != arrays.ALL)
        if "arrays" in values
        else None,
        answers=read_answers(values["answers"], f"{row}: answers") if "answers" in values else None,
        objects=read_objects(values["objects"], f"{row}: objects") if "objects" in values else None,
        keypoints=read_poses(values["keypoints"], f"{row}: keypoints")
        if "keypoints" in values
        else None,
        **{
            field: read_picture(values[field], spec.base, f"{row}: {field}")
            for field in PICTURES
            if field in values
        },
        reduced=spec.reduce_labels or None,
    )


def _text(value: Any, where: str) -> str:
    """Return a string or a number of a data set as text; `datasets` reads a column of digits as
    numbers."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, str) or (number and math.isfinite(value)):
        return str(value)
    chat = isinstance(value, list) and bool(value) and isinstance(value[0], dict)
    fix = "Conversations are read by columns: {messages: COLUMN}." if chat else ""
    raise DataError(f"{str(value)[:80]} is not a string", where=where, accepted="a string", fix=fix)


def _score(value: Any, where: str) -> float:
    try:
        score = float(value)
    except (TypeError, ValueError):
        score = math.nan
    if not math.isfinite(score):
        raise DataError(
            f"{value!r} is not a finite number",
            where=where,
            accepted="a number",
            fix="Use the field label for names of classes.",
        )
    return score


def _usable(values: Mapping[str, Any]) -> bool:
    """Return True for a data set's row without nulls whose text is not empty or white space, and
    whose conversation has a message."""
    text = next(values[field] for field in INPUTS if field in values)
    empty = not text.strip() if isinstance(text, str) else text in ([], {})
    parts = [*values.values(), *values.get("arrays", {}).values()]
    return not empty and all(v is not None for v in parts)
