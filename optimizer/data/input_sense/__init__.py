"""Checks, by kind of input, that the inputs of a data set are usable and differ, before a model
runs on them."""

from __future__ import annotations

from collections.abc import Mapping

from optimizer.data.input_sense import image, tensors, text
from optimizer.data.input_sense.record import Sense
from optimizer.harness.contract import Contract
from optimizer.harness.inputs.image import IMAGE
from optimizer.harness.inputs.tensors import TENSORS
from optimizer.harness.inputs.text import TEXT

SENSES: Mapping[str, Sense] = {
    TEXT.name: Sense(text.measure, text.check, text.write_warnings),
    TENSORS.name: Sense(tensors.measure, tensors.check),
    IMAGE.name: Sense(image.measure, image.check, image.write_warnings),
}


def get_sense(contract: Contract) -> Sense:
    """Return the checks of plausibility for the contract's kind of input."""
    return SENSES[contract.input_kind]
