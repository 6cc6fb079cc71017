"""Check that rows of arrays have the model's inputs, and differ from each other."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from optimizer.data.datasets import Sample
from optimizer.data.input_sense.record import FEWEST
from optimizer.foundation.errors import DataError
from optimizer.harness import tasks
from optimizer.harness.contract import Contract


@dataclass(frozen=True)
class TensorSense:
    """Counts over a data set's rows, from which `check` judges them."""

    rows: int
    different: int
    sha256: str  # digest of all rows, in order


def measure(
    samples: Sequence[Sample], contract: Contract, encoder: None, length: int | None = None
) -> TensorSense:
    """Count the rows of `samples`. Raises DataError for a row that does not fit the model's
    inputs."""
    del length
    digests = []
    for i, sample in enumerate(samples):
        (one,) = tasks.look_up(contract).inputs.encode(contract, encoder, [sample.input])
        if one.problem:
            raise DataError(one.problem, where=f"row {i}", fix=one.fix)
        digests.append(sample.input.sha256)
    whole = hashlib.sha256("".join(digests).encode()).hexdigest()
    return TensorSense(len(digests), len(set(digests)), whole)


def check(sense: TensorSense, name: str) -> None:
    """Raise DataError where fewer than min(FEWEST, number of rows) rows differ.

    name: place of the data in the recipe, for messages
    """
    few = min(FEWEST, sense.rows)
    if sense.different < few:
        raise DataError(
            f"{sense.different} of {sense.rows} rows are different",
            where=f"{name} data",
            accepted=f"{few} different ones or more",
        )
