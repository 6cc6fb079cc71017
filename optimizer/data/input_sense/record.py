"""Record of the checks of a data set's inputs: the type of a row of the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from optimizer.data.datasets import Sample
from optimizer.harness.contract import Contract

FEWEST = 3  # minimum of inputs that differ as the model reads them: a batch of one, and one of two


def _none(counts: Any, name: str) -> list[str]:
    del counts, name
    return []


@dataclass(frozen=True)
class Sense:
    """Checks of the plausibility of one kind of input, such as texts that are all cut.

    measure: function (samples, contract, encoder, length) -> counts, a dataclass with sha256
    check: function (counts, place in the recipe) that raises DataError
    warnings: function (counts, place in the recipe) -> sentences
    """

    measure: Callable[[Sequence[Sample], Contract, Any, int | None], Any]
    check: Callable[[Any, str], None]
    warnings: Callable[[Any, str], list[str]] = _none
