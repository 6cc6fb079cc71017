"""Evaluation sets of a recipe: validate.data, and those of validate.also by name.

All are judged by one metric and margin. Gates of the first set are named quality.<metric> and so
on, those of a further set quality.<metric>.<name>. Every gate must pass, so a candidate that is too
bad on any one set passes with probability at most alpha for any number of sets, and no gate needs
to be stricter than alone (an intersection-union test: Berger 1982, Technometrics 24, 295-300). A
set that is report_only has a section and no gate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from optimizer.data.datasets import Sample, map_labels
from optimizer.foundation.errors import DataError
from optimizer.foundation.progress import say
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.harness.inputs.tensors import TENSORS
from optimizer.recipe.schema import DataSpec, Validate
from optimizer.validate.gates import Gate
from optimizer.validate.quality.metrics import (
    RANKING,
    RECALL,
    Integers,
    Ranking,
    rank_queries,
)

FIRST = ""
"""Name of validate.data."""

Rows = Mapping[str, Sequence[Sample]]
Judged = Mapping[str, tuple[list[Gate], dict[str, Any]]]
"""{set: (its gates, its section of the report)}."""


def list_further(settings: Validate) -> dict[str, DataSpec]:
    """List the data sets of validate.also: {place in the recipe: spec}."""
    return {f"validate.also.{name}.data": part.data for name, part in settings.also.items()}


def read_sets(settings: Validate, rows: Rows, contract: Contract) -> dict[str, list[Sample]]:
    """Return the rows of every evaluation set by its name, with labels converted to the model's
    label ids. Of a task that ranks, labels are relevance and stay as they are.

    rows: {place in the recipe: rows}
    """
    task = tasks.look_up(contract)
    labels = None if task.ranks else contract.labels
    labels = contract.choice.candidate_labels if task.chooses else labels
    by_name = {FIRST: map_labels(rows["validate.data"], settings.data, labels)}
    for (place, spec), name in zip(list_further(settings).items(), settings.also, strict=True):
        by_name[name] = map_labels(rows[place], spec, labels)
    if settings.train is not None:
        map_labels(rows["validate.train"], settings.train, None)
    return by_name


def check(settings: Validate, rows: Rows, contract: Contract) -> None:
    """Raise the DataErrors that follow from the rows and the model's labels alone, before any model
    runs.

    rows: {place in the recipe: rows}
    """
    by_name = read_sets(settings, rows, contract)
    if settings.metric in RANKING:
        for name, part in by_name.items():
            group_ranking(
                settings.metric, part, f"validate.also.{name}" if name else "validate.data"
            )
    if settings.metric in RECALL:
        for part in by_name.values():
            if tasks.look_up(contract).reads_texts:
                check_captions(settings.metric, part)
                continue
            labels_of_rows = np.array([r.label for r in part])
            check_pairs(settings.metric, labels_of_rows, len(contract.labels or ()))
    together, labels = tasks.look_up(contract).pairs_together, contract.labels or ()
    metric = settings.metric
    _check_labels(metric, rows["validate.data"], contract)
    if metric == "spearman" and together and len(labels) > 1 and contract.activation != "identity":
        raise DataError(
            f"metric spearman ranks one number per row, and the model has {len(labels)} labels",
            where="validate.metric",
            accepted="accuracy, f1, cosine",
        )
    if settings.metric == "probe_accuracy":
        check_classes([r.label for r in rows["validate.train"]])


def _check_labels(metric: str, rows: Sequence[Sample], contract: Contract) -> None:
    """Raise DataError where the metric needs one label per text and the model gives several, or the
    reverse."""
    if contract.input_kind == TENSORS.name and metric != "cosine":
        shapes = [o.axes for o in contract.outputs]
        shown = ", ".join(f"{o.name} {list(o.axes)}" for o in contract.outputs)
        if len(shapes) != 1 or len(shapes[0]) != 2:
            raise DataError(
                f"metric {metric} reads a label from the largest of one row of numbers, and the "
                f"model has outputs {shown}",
                where="validate.metric",
                accepted="cosine; or one output of [batch, classes]",
                fix="Name that output: model.outputs: [...].",
            )
    several = contract.multi_label
    listed = any(r.labels is not None for r in rows)
    of_sets = metric in ("f1", "micro_f1") and several != listed
    if of_sets or (metric == "accuracy" and several):
        raise DataError(
            f"the model gives a text {'any number of its labels' if several else 'one label'}, and "
            f"metric {metric} would judge it by column {'labels' if listed else 'label'}",
            where="validate.metric",
            accepted="f1 or micro_f1 with a column for labels, cosine"
            if several
            else "accuracy or f1 with a column for label, cosine",
        )


def group_ranking(metric: str, rows: Sequence[Sample], where: str = "validate.data") -> Ranking:
    """Group the rows by query, which is their text; relevance is their score, else their label.

    metric: ndcg or mrr
    where: place of the rows, for messages

    Raises DataError for relevance below 0, and where no query is left to judge.
    """
    field = "score" if all(row.score is not None for row in rows) else "label"
    relevance = np.array([getattr(row, field) for row in rows], np.float64)
    if not relevance.min() >= 0:  # also for rows without any
        raise DataError(
            f"a {field} is {relevance.min():g}, and metric {metric} reads it as relevance",
            where=where,
            accepted="0 for a document that is not relevant, more for one that is",
            fix="Give relevance in the column of columns.score or columns.label.",
        )
    ranked = rank_queries(metric, [row.text for row in rows], relevance)
    if not len(ranked.rows):
        raise DataError(
            f"no order of documents is better than another in any of {ranked.left_out} queries",
            where=where,
            accepted="rows of one text (the query) with several documents as text_pair, relevant "
            "ones and others",
            fix="Give a row per query and document, with the same text in all rows of a query.",
        )
    return ranked


def check_classes(labels: Sequence[int | None]) -> None:
    """Raise DataError where all rows that validate evaluates by a probe have the same label.

    labels: label id of each row; None: not labelled
    """
    if len(set(labels)) < 2:
        raise DataError(
            f"all {len(labels)} rows have label {labels[0]}",
            where="validate.train",
            accepted="rows of two labels or more",
        )


def check_captions(metric: str, rows: Sequence[Sample]) -> None:
    """Raise DataError for a text_pair that several images have, and where check_pairs does."""
    seen = set[str | None]()
    for row in rows:
        if row.text_pair in seen:
            raise DataError(
                f"two images have the text_pair {str(row.text_pair)[:80]!r}, and metric {metric} "
                "reads pairs of an image and its text",
                where="validate.data",
                accepted="each text_pair in one row",
            )
        seen.add(row.text_pair)
    check_pairs(metric, np.arange(len(rows)), len(rows))


def check_pairs(metric: str, texts: Integers, outputs: int) -> None:
    """Raise DataError for a text that several images have, and for too few images or texts to
    choose from.

    metric: metric of RECALL
    texts: label id of each image
    outputs: number of labels
    """
    numbers, counts = np.unique(texts, return_counts=True)
    if counts.max() > 1:
        raise DataError(
            f"label {numbers[counts.argmax()]} has {counts.max()} images, and metric {metric} "
            "reads pairs of an image and its text",
            where="validate.data",
            accepted="each label in one row; accuracy for labels with several images",
        )
    if min(len(texts), outputs) <= RECALL[metric]:
        raise DataError(
            f"there are {len(texts)} images and {outputs} texts: the best {RECALL[metric]} always "
            "include the right one",
            where="validate.data",
            accepted=f"more than {RECALL[metric]} of both",
        )


def gather(
    settings: Validate, judged: Judged
) -> tuple[list[Gate], dict[str, Any], dict[str, dict[str, Any]]]:
    """Join the results of all sets: (gates of the sets that have some, section of the first set,
    {name: section} of the further sets)."""
    gates, first = judged[FIRST]
    kept, others = list(gates), {}
    for name, part in settings.also.items():
        judged_gates, section = judged[name]
        others[name] = {**section, "report_only": part.report_only}
        if part.report_only:
            for gate in judged_gates:
                say(f"validate: reported only: on {name}: {gate.message}")
            continue
        kept += [
            replace(g, name=f"{g.name}.{name}", message=f"on {name}: {g.message}")
            for g in judged_gates
        ]
    return kept, first, others
