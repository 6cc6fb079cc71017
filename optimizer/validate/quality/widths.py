"""Compare a student with a reference whose embeddings have another width.

Vectors of different widths have no cosine. The metrics compare how each system uses its own
vectors: similarities, nearest texts, and a probe that is fitted to its own embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from optimizer.data.datasets import Sample
from optimizer.foundation.errors import RecipeError
from optimizer.harness import contract as contracts
from optimizer.recipe.schema import Validation
from optimizer.validate.quality.metrics import Metric, shares
from optimizer.validate.quality.quality import Answers, Probe
from optimizer.validate.run_artifacts import RunArtifacts


def differ(m: RunArtifacts) -> bool:
    """Return True if the candidate's vectors have another width than the reference's."""
    return _width(m.reference) != _width(m.source)


def check(section: Validation, reference: Path, smaller: Path) -> None:
    """Raise RecipeError for a gate that needs a cosine between vectors of different widths.

    reference: folder of load
    smaller: folder of reduce
    """
    settings, widths = section.validate_, [_width(folder) for folder in (smaller, reference)]
    if widths[0] == widths[1]:
        return
    key = "metric" if settings.metric == "cosine" else "min_cosine"
    if settings.metric == "cosine" or settings.min_cosine is not None:
        raise RecipeError(
            f"the student's embeddings have {widths[0]} values and the reference's {widths[1]}, so "
            "no cosine can be computed between them",
            where=f"validate.{key}",
            accepted="metric spearman, retrieval or probe_accuracy, without min_cosine",
            fix="Set one of these metrics, or use a student of the reference's width.",
        )


def _width(folder: Path) -> object:
    contract = contracts.read(folder / "contract.json")
    return contract.outputs[0].axes[-1]


def compare_probes(
    rows: Sequence[Sample],
    answers: tuple[Answers, Answers],
    train: Sequence[Sample],
    train_answers: tuple[Answers, Answers],
) -> Metric:
    """Compute metric probe_accuracy, where each system has a probe that is fitted to its own
    answers.

    rows: labelled evaluation rows
    answers: answers of (baseline, candidate) to them
    train: labelled rows to fit on
    train_answers: answers of (baseline, candidate) to them
    """
    labels, train_labels = (np.array([r.label for r in part]) for part in (rows, train))
    fits = [Probe.fit(np.stack(a.text), train_labels) for a in train_answers]
    right = [p.predict(np.stack(a.text)) == labels for p, a in zip(fits, answers, strict=True)]
    return shares(right[0], right[1])
