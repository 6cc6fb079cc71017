"""Look at a file of rows for `optimize init`: columns, labels, and its split into parts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from optimizer.commands.build.initial.columns import (
    CHAT,
    LOOKED_AT,
    choose_metric,
    is_multi_label,
    is_regression,
    propose,
    split_labels,
)
from optimizer.commands.build.initial.model import ModelFacts, describe_unknown_tokens
from optimizer.commands.build.initial.parts import PARTS, check_number, split_rows, write_part
from optimizer.data import conversations
from optimizer.data.answers import read_answers
from optimizer.data.datasets import PICTURES as PATHS
from optimizer.data.labels import UNNAMED, normalize_text
from optimizer.data.pictures import disable_decoding
from optimizer.data.same_rows import make_text_keys
from optimizer.data.tables import FILE_FORMATS, open_table
from optimizer.foundation.errors import DataError
from optimizer.recipe.schema import DataSpec

FORMATS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}
NO_NAMES = "name the labels that the model is to choose from in zero_shot.candidate_labels"
IMPOSSIBLE = "answers: {handle_impossible_answer: true}   # rows have no answer"
QUERIES = 150  # of a ranker's evaluation: ln(0.05) / ln(1 - 0.02), where nothing is lost
CHARACTERS = {"calibrate": 150_000, "time": 40_000, "evaluate": 400_000}
"""Maximum of each part for text-generation, which reads windows of joined texts: 32 of 512 tokens,
and some hundred of 256."""


@dataclass(frozen=True)
class DataFacts:
    """Data set for a new recipe, as the recipe names it.

    source: format
    files: {part: (file as the recipe names it, rows)}
    columns: {our field: column}
    labels: names in id order; () for a column of the model's ids, and without labels
    decisions: sentences about what must still be decided
    settings: further keys of the recipe's section `model`, "key: value"
    """

    source: str
    files: Mapping[str, tuple[str, int]]
    columns: Mapping[str, str]
    metric: str
    labels: tuple[str, ...] = ()
    decisions: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


def describe_absent(model: ModelFacts) -> DataFacts:
    """Return the data that a recipe for this model needs, with what to bring as a decision."""
    task = model.task
    metric = choose_metric(model)
    ways = task.metrics[metric]
    ways = ways[-1:] if is_multi_label(model) else ways  # labels, not one label
    pairs = task.ranks or task.extracts or is_regression(model)
    inputs = [task.inputs.columns[0], *(["text_pair"] if pairs else [])]
    fields = list(dict.fromkeys([*inputs, *next(iter(ways), ())]))
    labels = "" if not {"label", "labels"} & set(fields) else f" ({_accepted_labels(model)})"
    rows = "about 16,000 tokens of text" if task.generates else f"256 {task.inputs.name}s or more"
    bring = (
        "bring two files beside this recipe (csv, json lines, parquet or text), or let "
        f"optimize init {model.name} --data FILE make them from one",
        f"calibrate.csv: {rows} like those in production; column {', '.join(inputs)}",
        f"evaluate.csv: 500 rows or more, none of them in calibrate.csv; column "
        f"{', '.join(fields)}{labels}",
    )
    files = {"calibrate": ("calibrate.csv", 0), "evaluate": ("evaluate.csv", 0)}
    choice = (_choice(("first label", "second label")),) if task.needs_labels else ()
    more = (NO_NAMES,) if task.needs_labels else ()
    return DataFacts("csv", files, {f: f for f in fields}, metric, (), (*bring, *more), choice)


def _accepted_labels(model: ModelFacts) -> str:
    if not model.labels:
        return "ids from 0, or names with labels: in id order"
    return f"0 to {len(model.labels) - 1}: {', '.join(model.labels)}"[:200]


def look(file: Path, folder: Path, recipe_folder: Path, model: ModelFacts) -> DataFacts:
    """Propose for a new recipe columns of the data in `file`, write its parts into `folder`, and
    return both.

    file: csv, json lines, parquet or text, or a folder of images
    folder: folder of the parts; made
    recipe_folder: folder that names of files in the recipe are relative to

    Raises DataError for data without a usable column or with too few rows, and for a part that
    exists with another content.
    """
    table = _open(file)
    columns, decisions = propose(table, file, model)
    labels, doubts = _labels(table, columns, model)
    decisions += doubts
    if doubts:
        columns.pop("label", None)
        columns.pop("labels", None)
        columns.pop("tags", None)
    metric = _metric(columns, model)
    if not model.task.metrics[metric] and model.task.classifies and not doubts:
        left = [n for n in table.column_names if n not in columns.values()]
        decisions.append(
            f"no column with labels was found, so metric {metric} compares with the float model; "
            "to judge by labels, name it in validate under columns: (label: COLUMN) and set "
            f"metric: {_labelled_metric(model)}; not used: {', '.join(left) or 'none'}"
        )
    rows = _rows(table, columns, file, recipe_folder)
    check_number(rows, file)
    doubt = _doubt_tokenizer(rows, columns, model)
    decisions += [doubt] if doubt else []
    parts = _split(rows, columns, model, doubt)
    queries = len({row[columns["text"]] for row in parts["evaluate"]}) if model.task.ranks else 0
    if 0 < queries < QUERIES:
        decisions.append(
            f"the evaluation has {queries} queries in {len(parts['evaluate'])} rows, and {QUERIES} "
            "or more decide a margin of 0.02: bring more queries, or fewer documents of each"
        )
    named = {
        part: (
            write_part(folder / f"{part}.jsonl", _json_lines(chosen), recipe_folder),
            len(chosen),
        )
        for part, chosen in parts.items()
    }
    impossible = any(row.get(columns.get("answers", "")) == [] for row in rows)
    settings = (IMPOSSIBLE,) if impossible else ()
    if model.task.needs_labels:
        settings = (_choice(labels),)
        decisions += [] if labels else [NO_NAMES]
    return DataFacts("json", named, columns, metric, labels, tuple(decisions), settings)


def _choice(labels: Sequence[str]) -> str:
    """Return the key of a new recipe with the labels that a zero-shot model chooses from."""
    names = ", ".join(map(json.dumps, labels))
    return f"zero_shot: {{candidate_labels: [{names}]}}"


def _open(file: Path) -> Any:
    if file.is_dir():
        spec = DataSpec(source=str(file.resolve()))
    else:
        kind = FORMATS.get(file.suffix.lower())
        if kind is None or not file.is_file():
            what = "a file of another format" if file.is_file() else "not a file"
            raise DataError(
                f"{str(file)!r} is {what}",
                where="--data",
                accepted=f"a file that ends in {', '.join(FORMATS)}, or a folder of images",
                fix=f"Save it as one of {', '.join(FILE_FORMATS)}." if file.is_file() else "",
            )
        spec = DataSpec(source=kind, files=(str(file.resolve()),))
    return open_table(spec)


def _labels(
    table: Any, columns: Mapping[str, str], model: ModelFacts
) -> tuple[tuple[str, ...], list[str]]:
    """Match for a new recipe the values of the label column with the model's labels.

    Returns (names of the labels in id order, [reason why the column cannot be used]). The names are
    () without a label column, for a column of ids, and for one that cannot be used.
    """
    column = columns.get("label") or columns.get("labels") or columns.get("tags")
    if column is None:
        return (), []
    feature = table.features[column]
    declared = getattr(getattr(feature, "feature", feature), "names", None)
    values = [v for value in table[column] for v in split_labels(value, "labels" in columns)]
    values = sorted({v for v in values if v is not None}, key=str)
    if declared:
        values = list(declared)
    count = len(model.labels)
    shown = ", ".join(map(str, values[:8])) + (", ..." if len(values) > 8 else "")
    if all(isinstance(v, int) for v in values):
        fits = not count or (values[0] >= 0 and max(values) < count)
        why = f"column {column!r} holds {shown}, which are not ids of the model's {count} labels"
        return (), [] if fits else [f"{why}; it is left out"]
    names = [str(v) for v in values]
    spelled = {normalize_text(name): name for name in names}
    own = [normalize_text(label) for label in model.labels]
    if set(spelled) <= set(own):
        return tuple(spelled.get(n, model.labels[i]) for i, n in enumerate(own)), []
    if (not own or all(map(UNNAMED.fullmatch, model.labels))) and count in (0, len(names)):
        return tuple(names), []
    return (), [
        f"column {column!r} holds {shown}, and the model's labels are {', '.join(model.labels)}; "
        "it is left out"[:300]
    ]


def _labelled_metric(model: ModelFacts) -> str:
    """Choose for a new recipe the task's first metric that reads labels."""
    fields = {"label", "labels", "tags"}
    metrics = model.task.metrics.items()
    return next(m for m, ways in metrics if fields & {f for way in ways for f in way})


def _metric(columns: Mapping[str, str], model: ModelFacts) -> str:
    """Choose for a new recipe the task's first metric whose columns exist, else the one that needs
    no columns."""
    if is_regression(model) or model.task.ranks:
        return choose_metric(model)
    metrics = {m: ways for m, ways in model.task.metrics.items() if m != "probe_accuracy"}
    usable = (m for m, ways in metrics.items() if any(set(way) <= set(columns) for way in ways))
    return next(usable, next((m for m, ways in metrics.items() if not ways), [*metrics][-1]))


def _rows(
    table: Any, columns: Mapping[str, str], file: Path, recipe_folder: Path
) -> list[dict[str, Any]]:
    """Return a new recipe's rows of data, without those that have a null or an empty text; only the
    columns used."""
    base = file if file.is_dir() else file.parent
    images = [columns[field] for field in ("image", *PATHS) if columns.get(field)]
    for column in images:
        table = disable_decoding(table, column)
    feature = table.features.get(columns.get("label", ""))
    names = getattr(feature, "names", None)
    answers = columns.get("answers")
    rows = []
    for row in table.select_columns(list(columns.values())):
        if answers:
            row[answers] = list(read_answers(row[answers] or [], f"--data {file}: {answers}"))
        if any(v is None or (isinstance(v, str) and not v.strip()) for v in row.values()):
            continue
        for image in images:
            value = row[image]
            path = value if isinstance(value, str) else (value or {}).get("path")
            if not isinstance(path, str):
                raise DataError(
                    "the images are contents, not paths, and such a file is not split",
                    where=f"--data {file}",
                    fix="Give a file with a column of paths, or a folder with a folder per label.",
                )
            row[image] = os.path.relpath(base.resolve() / path, recipe_folder.resolve())
        if names:
            row[columns["label"]] = names[row[columns["label"]]]
        rows.append(row)
    return rows


def _doubt_tokenizer(
    rows: Sequence[dict[str, Any]], columns: Mapping[str, str], model: ModelFacts
) -> str:
    """Return a warning for `optimize init` if the tokenizer does not know many tokens of the first
    rows, else ""."""
    column = columns.get("text") or columns.get("messages")
    if column is None:
        return ""
    return describe_unknown_tokens(model, [_read_text(row[column]) for row in rows[:LOOKED_AT]])


def _read_text(value: Any) -> str:
    """Return the text of a value in a new recipe's data set: a text, a list of words, or a
    conversation."""
    if isinstance(value, str) and CHAT.match(value):
        return conversations.join_messages(conversations.parse(value, "--data"))
    if not isinstance(value, list):
        return str(value)
    if value and isinstance(value[0], Mapping):
        return conversations.join_messages(conversations.parse(value, "--data"))
    return " ".join(value)


def _split(
    rows: Sequence[dict[str, Any]], columns: Mapping[str, str], model: ModelFacts, doubt: str
) -> dict[str, list[dict[str, Any]]]:
    """Split rows into the parts of a new recipe, with no text or image in two parts.

    Returns {part: rows} for the parts "calibrate", "time" and "evaluate".

    doubt: warning of `_doubt_tokenizer`, or ""; used as advice in errors

    Raises DataError for a part without rows.
    """
    unique: tuple[str, ...] = ("text", "text_pair", "image", "messages")
    if model.task.ranks or model.task.extracts:  # queries share documents, contexts questions
        unique = ("text", "image") if model.task.ranks else ("text_pair",)
    fields = [c for f, c in columns.items() if f in unique]

    def texts(row: Mapping[str, Any]) -> list[str]:
        return [_read_text(row[c]) for c in fields]

    ids = model.token_ids
    keys = make_text_keys([t for row in rows for t in texts(row)], ids)
    inputs = [[keys[t] for t in texts(row)] for row in rows]
    label = columns.get("label")
    labels = [row[label] if label else None for row in rows]
    size, most = len(rows), PARTS
    if model.task.generates:
        size, most = sum(len(t) for row in rows for t in texts(row)), CHARACTERS
    fix = f"{doubt[0].upper()}{doubt[1:]}." if doubt else ""
    parts = split_rows(inputs, labels, size, most, fix)
    return {part: [rows[i] for i in chosen] for part, chosen in parts.items()}


def _json_lines(rows: Sequence[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()
