"""The evaluation sets of a recipe: validate.data, and those of validate.also by name.

All are judged by one rule, metric and margin. The first set's gates are quality.<metric> and so on;
those of a further set have its name behind, quality.<metric>.<name>. Every gate must pass, so a
candidate that is too bad on any one set passes with probability at most alpha, however many sets
there are (an intersection-union test: Berger 1982, Technometrics 24, 295-300): none of them needs
to be stricter than alone. A set that is report_only has its section, and no gate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from optimizer.data.datasets import Sample, labelled_as
from optimizer.foundation.errors import DataError
from optimizer.foundation.progress import say
from optimizer.harness import tasks
from optimizer.harness.contract import Contract
from optimizer.recipe.schema import DataSpec, Validate
from optimizer.validate.gates import Gate

FIRST = ""
"""The name of validate.data."""

Rows = Mapping[str, Sequence[Sample]]
Judged = Mapping[str, tuple[list[Gate], dict[str, Any]]]
"""Per set, its gates and its section of the report."""


def further(settings: Validate) -> dict[str, DataSpec]:
    """The data of validate.also by its place in the recipe."""
    return {f"validate.also.{name}.data": part.data for name, part in settings.also.items()}


def sets(settings: Validate, rows: Rows, labels: Sequence[str] | None) -> dict[str, list[Sample]]:
    """The rows of every set by name, label ids as the model has them. rows: by place."""
    by_name = {FIRST: labelled_as(rows["validate.data"], settings.data, labels)}
    for (place, spec), name in zip(further(settings).items(), settings.also, strict=True):
        by_name[name] = labelled_as(rows[place], spec, labels)
    return by_name


def check(settings: Validate, rows: Rows, contract: Contract) -> None:
    """Raise the DataError that judging would, as far as the data and the model's labels say."""
    sets(settings, rows, contract.labels)
    together, labels = tasks.of(contract).pairs_together, contract.labels or ()
    if settings.metric == "spearman" and together and len(labels) > 1:
        raise DataError(
            f"metric spearman ranks one number per row, and the model has {len(labels)} labels",
            where="validate.metric",
            accepted="accuracy, f1, cosine",
        )
    if settings.metric == "probe_accuracy":
        check_classes([r.label for r in rows["validate.train"]])


def check_classes(labels: Sequence[int | None]) -> None:
    """Raise DataError where a probe has nothing to tell apart."""
    if len(set(labels)) < 2:
        raise DataError(
            f"all {len(labels)} rows have label {labels[0]}",
            where="validate.train",
            accepted="rows of two labels or more",
        )


def gathered(
    settings: Validate, judged: Judged
) -> tuple[list[Gate], dict[str, Any], dict[str, dict[str, Any]]]:
    """The gates of all sets that have some, the first set's section, and the others' by name."""
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
