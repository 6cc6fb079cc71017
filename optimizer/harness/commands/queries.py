"""Read the inputs of `predict`: words of the command line, or lines of standard input."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from .. import tasks
from ..errors import InputError
from ..trust.verify import parse as parse_json

if TYPE_CHECKING:
    from ..bundle.bundle import Bundle
    from ..contract import Contract
    from ..inputs.lines import ByteStream
    from ..tasks.answering import Query
    from ..tasks.task import Task


def accepts_pairs(bundle: Bundle) -> bool:
    """Return True for a model, asked by `predict`, that reads two texts together and was judged on
    pairs."""
    validate = bundle.manifest["recipe"].get("validate") or {}
    columns = (validate.get("data") or {}).get("columns") or {}
    return bundle.task.pairs_together and "text_pair" in columns


def _pair_form(names: Sequence[str]) -> str:
    """Return an example of a line with a pair, for messages of `predict`. names: fields of its
    texts"""
    return json.dumps(dict(zip(names, ("a question", "a passage"), strict=True)))


def refuse_single_texts(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Raise InputError for texts on the command line without --pair.

    names: fields of the two texts, for the message
    """
    if args.texts or args.text:
        raise InputError(
            "absent, and this model reads pairs of texts: it was judged on pairs alone",
            where="--pair",
            accepted="one per text, in the order of the texts; or pairs on standard input, one "
            f"object per line: {_pair_form(names)}",
            fix='E.g. predict "a question" --pair "a passage".',
        )


def parse_pairs(window: Sequence[Query], names: Sequence[str]) -> list[Query]:
    """Parse each line of `predict` as a JSON object with both texts of a pair.

    names: fields of the two texts

    Raises InputError that names the line.
    """
    pairs, (first, second) = [], names
    for one in window:
        try:
            document = parse_json(one.input.encode())
        except (ValueError, RecursionError):
            document = None
        texts = list(document.values()) if isinstance(document, dict) else []
        if set(document or ()) != {*names} or not all(isinstance(t, str) for t in texts):
            raise InputError(
                "it is not an object with two texts, and this model reads pairs of texts",
                where=one.where,
                accepted=_pair_form(names),
                fix=f"E.g. jq -c '{{{first}: .query, {second}: .document}}' rows.jsonl | predict.",
            )
        pairs.append(replace(one, input=document[first], pair=document[second]))
    return pairs


def check_labels(labels: str | None, contract: Contract) -> None:
    """Raise InputError for `predict --labels` with a model that does not take the labels of a
    request."""
    from ..inputs.text import check_text

    if labels is None:
        return
    if accepts_labels(contract):
        check_text(labels, "--labels")
        return
    task = tasks.look_up(contract)
    why = (
        "whose labels are those of its recipe, encoded in its weights" if task.names_labels else ""
    )
    raise InputError(
        f"the task is {task.name}{f', {why}' if why else ', which takes no labels'}",
        where="--labels",
        accepted="a model of task zero-shot-classification, or of zero-shot-image-classification "
        "with labels_of_requests",
        fix="Set model.zero_shot.labels_of_requests: true in the recipe, and run it."
        if why
        else "",
    )


def accepts_labels(contract: Contract) -> bool:
    """Return True if `predict` accepts --labels for this contract's model: the labels to choose
    from."""
    return tasks.look_up(contract).chooses or contract.label_texts is not None


def parse_labels(window: Sequence[Query], labels: str | None, field: str) -> list[Query]:
    """Parse lines of `predict` that are JSON objects with an input and its labels; other lines are
    inputs.

    labels: labels of inputs that give none; None: the contract's
    field: name of the input in such a line, text or image
    """
    from ..inputs.hypothesis import add_labels

    queries = []
    for one in window:
        document = None
        with suppress(ValueError, RecursionError):
            document = parse_json(one.input.encode()) if one.input.startswith("{") else None
        if isinstance(document, dict) and isinstance(document.get(field), str):
            own = {n: v for n, v in document.items() if n != field}
            pair = json.dumps(own) if own else one.pair
            queries.append(replace(one, input=document[field], pair=pair))
        else:
            queries.append(one)
    return [replace(one, pair=add_labels(one.pair, labels)) for one in queries]


def parse_inputs(window: Sequence[Query], task: Task) -> list[Query]:
    """Parse lines of the command `predict` into inputs of the task's kind. A pair is a text for
    every kind."""
    return [replace(a, input=task.inputs.parse(a.input)) for a in window]


def parse_objects(window: Sequence[Query], names: Sequence[str]) -> list[Query]:
    """Parse lines of `predict` that are JSON objects with the fields `names`; other lines are first
    inputs."""
    queries, (first, second) = [], names
    for one in window:
        document = None
        with suppress(ValueError, RecursionError):
            document = parse_json(one.input.encode()) if one.input.startswith("{") else None
        if isinstance(document, dict) and isinstance(document.get(first), str):
            pair = json.dumps(document[second]) if second in document else one.pair
            queries.append(replace(one, input=document[first], pair=pair))
        else:
            queries.append(one)
    return queries


def read_queries(args: argparse.Namespace, noun: str) -> Iterator[list[Query]]:
    """Yield the inputs of `predict` from the command line, or from standard input in portions as
    they arrive.

    noun: name of one input, for messages

    Raises InputError for a text that cannot be read, and for pairs that are not one per text.
    """
    from ..inputs.lines import read_windows
    from ..inputs.text import check_text
    from ..tasks.answering import WINDOW, Query

    most = WINDOW * args.batch_size
    source = cast("ByteStream", sys.stdin.buffer)
    for i, pair in enumerate(args.pair):
        check_text(pair, f"--pair {i + 1}")
    texts = [*args.texts, *args.text]
    if texts or args.pair:
        kind = "line" if args.jsonl else noun
        named = [(f"{kind} {i}", t) for i, t in enumerate(texts, 1)]
        for where, text in named:
            check_text(text, where)
        if not texts:  # one line per --pair: few
            lines = (line for window in read_windows(source, most) for line in window)
            named = [(f"line {line.number}", line.text) for line in lines]
        if args.pair and len(args.pair) != len(named):
            raise InputError(
                f"{len(args.pair)} were given for {len(named)} texts",
                where="--pair",
                accepted="one per text, in the order of the texts, or none",
            )
        pairs = args.pair or [None] * len(named)
        every = [Query(where, t, p) for (where, t), p in zip(named, pairs, strict=True)]
        for start in range(0, len(every), most):
            yield every[start : start + most]
        return
    for window in read_windows(source, most):
        yield [Query(f"line {line.number}", line.text) for line in window]
