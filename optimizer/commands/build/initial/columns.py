"""Propose columns of a table for the fields of a task, by names, types and first values."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from optimizer.commands.build.initial.model import ModelFacts
from optimizer.data import conversations
from optimizer.data.datasets import PICTURES as PATHS
from optimizer.data.labels import normalize_text
from optimizer.foundation.errors import DataError
from optimizer.harness.inputs.image import IMAGE

LOOKED_AT = 1_000  # rows from which columns are proposed
OF_IMAGES = ("objects", "keypoints", *PATHS)
"""Fields of what is right about an image."""
NOTHING_RIGHT = (
    "no column {} was found, so the metric compares with the float model; to judge the answers "
    "themselves, name it in validate under columns:"
)
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
NAMES = {  # field: usual names of its column, most usual first
    "text": (
        *("text", "sentence", "sentence1", "review", "content", "body", "comment", "message"),
        *("question", "query", "premise", "prompt", "input", "document", "title", "smiles", "rxn"),
    ),
    "text_pair": (
        *("text_pair", "sentence2", "hypothesis", "passage", "answer", "context", "document"),
        *("response", "positive", "query2", "question2"),
    ),
    "label": (
        *("label", "labels", "class", "category", "sentiment", "intent", "target", "topic"),
        *("genre", "type", "tag", "y"),
    ),
    "score": ("score", "similarity", "relevance", "rating", "label", "target", "y"),
    "query": ("query", "question", "anchor", "text", "text1", "sentence1", "title"),
    "document": (
        *("document", "doc", "passage", "text_pair", "text", "body", "content", "answer"),
        *("context", "response", "positive", "text2", "sentence2"),
    ),
    "messages": ("messages", "conversations", "conversation", "dialogue", "chat"),
    "question": ("question", "query", "text", "prompt"),
    "context": ("context", "passage", "document", "paragraph", "text_pair", "body", "content"),
    "answers": ("answers", "answer", "answer_text", "label", "target"),
    "image": ("image", "img", "file", "path", "filename", "file_name"),
    "objects": ("objects", "annotations", "boxes"),
    "keypoints": ("keypoints", "poses", "persons", "annotations", "objects"),
    "mask": ("mask", "label", "segmentation", "annotation", "labels"),
    "depth": ("depth", "depth_map", "disparity"),
    "tags": ("tags", "ner_tags", "labels", "pos_tags"),
    "words": ("tokens", "words", "text"),
}
CHAT = re.compile(r"""\s*\[\s*\{\s*["'](role|content|from|value)["']\s*:""")
"""Beginning of a conversation in a text."""


def choose_metric(model: ModelFacts) -> str:
    """Choose the metric that `optimize init` writes into a recipe for this model."""
    if is_multi_label(model):
        return "f1"
    return "spearman" if is_regression(model) else next(iter(model.task.metrics))


def is_regression(model: ModelFacts) -> bool:
    """Return True, for `optimize init`, for a model whose answer is a number, compared with scores
    in the data."""
    number = len(model.labels) == 1 or model.problem == "regression"
    return number and "spearman" in model.task.metrics and not model.task.ranks


def is_multi_label(model: ModelFacts) -> bool:
    """Return True, for `optimize init`, for a classifier whose texts may have any number of its
    labels."""
    return model.problem == "multi_label_classification" and "micro_f1" in model.task.metrics


def propose(table: Any, file: Path, model: ModelFacts) -> tuple[dict[str, str], list[str]]:
    """Choose for a new recipe the columns of a table that hold the fields of the model's task.

    Returns ({field of a recipe's `columns`: column of the table}, sentences about choices that are
    not certain).

    table: data set of the package datasets
    file: file of the table, for messages

    Raises DataError for a table without a column that the task needs.
    """
    head, decisions = table[:LOOKED_AT], []
    first, second = _pair_names(model)
    if model.task.inputs.name == IMAGE.name:
        first = _find_column("image", [n for n in head if _is_image(table, n, head[n])], head)
        fields = {"image": first}
        beside = [n for n in head if n != first]
        of_metrics = dict.fromkeys(
            f for ways in model.task.metrics.values() for w in ways for f in w
        )
        fields |= {f: _by_name(f, beside) for f in of_metrics if f in OF_IMAGES}
        missing = [f for f in of_metrics if f in OF_IMAGES and not fields[f]]
        decisions += [NOTHING_RIGHT.format(", ".join(missing))] if missing else []
    elif model.task.per_position and model.task.classifies:
        lists = [n for n in head if isinstance(next(iter(head[n]), None), list)]
        fields = {"text": _find_column("words", lists, head)}
        fields["tags"] = _find_column("tags", [n for n in lists if n != fields["text"]], head)
    elif chats := _chats(head) if model.task.generates else []:
        fields = {"messages": _find_column("messages", chats, head)}
    else:
        strings = [n for n in head if isinstance(next(iter(head[n]), None), str)]
        fields = {"text": _find_column(first, strings, head)}
        if model.task.ranks or model.task.extracts:  # no task without the pair
            fields |= _find_pair_columns(strings, head, model, file)
    place = next(iter(fields))
    if not fields[place]:
        raise DataError(
            f"no column of {model.task.inputs.name}s was found",
            where=f"--data {file}",
            accepted="a column of "
            + ("paths or images" if model.task.inputs.name == IMAGE.name else "strings, e.g. text"),
            fix=f"It has the columns {', '.join(table.column_names)}.",
        )
    others = [n for n in head if n not in fields.values()]
    strange = [c for f, c in fields.items() if c.lower() not in NAMES[_usual(f, model)]]
    if "text_pair" in fields and strange:
        both = f"{fields['text']!r} is used as {first} and {fields['text_pair']!r} as {second}"
        key = "columns: {text: COLUMN, text_pair: COLUMN}"
        decisions.append(f"column {both}; to change it, rename them or set {key} in each section")
    elif place == "text" and fields[place].lower() not in NAMES[first] and len(head) > 1:
        decisions.append(f"column {fields['text']!r} is used as text; others: {', '.join(others)}")
    if _reads_pairs(model) and place == "text" and "text_pair" not in fields:
        strings = [n for n in others if isinstance(next(iter(head[n]), None), str)]
        fields["text_pair"] = _by_name(second, strings)
        others = [n for n in others if n != fields["text_pair"]]
    scored = is_regression(model) or model.task.ranks
    if model.task.extracts:
        fields["answers"] = _by_name("answers", others)
        decisions += [] if fields["answers"] else [_report_no_answers(others)]
    elif scored or (fields.get("text_pair") and not model.task.classifies):
        numbers = [n for n in others if all(isinstance(v, int | float) for v in head[n])]
        lists = [n for n in others if _is_numbers(head[n], len(model.labels))]
        fields["score"] = _by_name("score", lists if len(model.labels) > 1 else numbers)
    elif is_multi_label(model):
        fields["labels"] = _label_column(others, head, model)
    elif model.task.classifies and "tags" not in fields:
        fields["label"] = _label_column(others, head, model)
    if scored and not fields.get("score"):
        left = [n for n in head if n not in fields.values()]
        decisions.append(
            "no column was found for the score that the model answers with, and metric "
            f"{choose_metric(model)} needs one: name it in validate under columns: (score: COLUMN, "
            f"and text_pair: COLUMN for pairs); not used: {', '.join(left) or 'none'}"
        )
    return {field: column for field, column in fields.items() if column}, decisions


def _usual(field: str, model: ModelFacts) -> str:
    """Return the key of NAMES that lists the names that `optimize init` expects of a column."""
    first, second = _pair_names(model)
    return {"text": first, "text_pair": second}.get(field, field)


def _find_pair_columns(
    strings: Sequence[str], head: Mapping[str, Sequence[Any]], model: ModelFacts, file: Path
) -> dict[str, str]:
    """Choose for a new recipe {"text": column, "text_pair": column} for a task that reads two
    texts.

    Columns with the usual names are taken; else the one with the longest texts is the pair, and the
    next longest the text. Raises DataError for fewer than two columns of strings.
    """
    first, second = _pair_names(model)
    if len(strings) < 2:
        raise DataError(
            f"{len(strings)} column of texts was found ({', '.join(strings) or 'none'}), and task "
            f"{model.task.name} reads two: {first} and {second}",
            where=f"--data {file}",
            accepted=f"a column {first} and a column {second}, of strings",
            fix=f"It has the columns {', '.join(head)}.",
        )
    text = _by_name(first, strings)
    pair = _by_name(second, [n for n in strings if n != text])
    pair = pair or _find_column(second, [n for n in strings if n != text], head)
    return {
        "text": text or _find_column(first, [n for n in strings if n != pair], head),
        "text_pair": pair,
    }


def _pair_names(model: ModelFacts) -> tuple[str, str]:
    """Return, for `optimize init`, the keys of NAMES for the input and its pair."""
    if model.task.extracts:
        return "question", "context"
    return ("query", "document") if model.task.ranks else ("text", "text_pair")


def _report_no_answers(others: Sequence[str]) -> str:
    return (
        "no column with the right answers was found, so metric agreement compares with the float "
        "model; to judge answers, name it in validate under columns: (answers: COLUMN) and set "
        f"metric: f1; not used: {', '.join(others) or 'none'}"
    )


def _is_numbers(values: Sequence[Any], count: int) -> bool:
    """Return True for values of a column, at `optimize init`, that are all lists of `count`
    numbers."""
    return all(
        isinstance(c, list) and len(c) == count and all(isinstance(x, int | float) for x in c)
        for c in values
    )


def _chats(head: Mapping[str, Sequence[Any]]) -> list[str]:
    """Find for a new recipe the columns whose first value is a conversation, or its JSON as a text.
    Raises DataError for a text that begins like one and is not JSON, such as Python's notation."""
    chats = []
    for name, values in head.items():
        first = next(iter(values), None)
        looks = isinstance(first, str) and CHAT.match(first) is not None
        with suppress(*() if looks else (DataError,)):
            chats += [name] if conversations.parse(first, f"--data: {name}") else []
    return chats


def _reads_pairs(model: ModelFacts) -> bool:
    return model.task.pairs_together or "retrieval" in model.task.metrics


def _is_image(table: Any, name: str, values: Sequence[Any]) -> bool:
    first = next(iter(values), None)
    path = isinstance(first, str) and first.lower().endswith(PICTURES)
    return path or isinstance(first, bytes) or "Image" in type(table.features[name]).__name__


def _by_name(field: str, names: Sequence[str]) -> str:
    lower = {name.lower(): name for name in names}
    return next((lower[n] for n in NAMES[field] if n in lower), "")


def _find_column(field: str, names: Sequence[str], head: Mapping[str, Sequence[Any]]) -> str:
    """Propose for a new recipe the column with a usual name; else the one with the longest and most
    values."""

    def weight(name: str) -> int:
        return sum(len(str(value)) for value in {str(v) for v in head[name]})

    return _by_name(field, names) or max(names, key=weight, default="")


def _label_column(
    names: Sequence[str], head: Mapping[str, Sequence[Any]], model: ModelFacts
) -> str:
    """Propose for a new recipe the column whose values are the model's labels, else the one with a
    usual name."""
    known = {normalize_text(label) for label in model.labels}
    for name in names:
        each = [v for value in head[name] for v in split_labels(value, is_multi_label(model))]
        values = {normalize_text(str(value)) for value in each if value is not None}
        if values and values <= known and len(values) > 1:
            return name
    return _by_name("label", names)


def split_labels(value: Any, several: bool) -> list[Any]:
    """Return the labels in one value of a column, as a list, for a new recipe's data.

    several: True splits a text at its commas
    """
    if several and isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    return value if isinstance(value, list) else [value]
