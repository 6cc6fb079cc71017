"""Table of the checks of a data set's inputs, by kind, before a model runs on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optimizer.data import image_sense, text_sense
from optimizer.data.datasets import Sample
from optimizer.data.tensors import sense as tensor_sense
from optimizer.harness.contract import Contract
from optimizer.harness.inputs.image import IMAGE
from optimizer.harness.inputs.tensors import TENSORS
from optimizer.harness.inputs.text import TEXT


@dataclass(frozen=True)
class Sense:
    """Checks of one kind of input.

    measure: (samples, contract, encoder, length) -> counts, with as_dict() and sha256
    check: (counts, place in the recipe) raises DataError
    warnings: (counts, place in the recipe) -> sentences
    """

    measure: Callable[[Sequence[Sample], Contract, Any, int | None], Any]
    check: Callable[[Any, str], None]
    warnings: Callable[[Any, str], list[str]]


SENSES: Mapping[str, Sense] = {
    TEXT.name: Sense(text_sense.measure, text_sense.check, text_sense.warnings),
    TENSORS.name: Sense(tensor_sense.measure, tensor_sense.check, tensor_sense.warnings),
    IMAGE.name: Sense(image_sense.measure, image_sense.check, image_sense.warnings),
}


def of(contract: Contract) -> Sense:
    """The Sense of the contract's kind of input."""
    return SENSES[contract.input_kind]
