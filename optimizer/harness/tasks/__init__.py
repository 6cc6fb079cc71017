"""From texts to arrays and from outputs to answers, one file per task.

    batch   = encode(contract, tokenizer, texts)          arrays the model takes
    outputs = runner.infer(batch)
    values  = decode(contract, outputs, batch)            the array the task is about
    results = answers(contract, values, batch)            one JSON-able answer per text

decode's array, by task: sentence-embedding (batch, hidden); text-classification (batch, labels)
logits; token-classification (batch, sequence, labels) logits; feature-extraction (batch,
sequence, hidden), zero where padded; text-generation (batch, sequence, vocabulary) logits, zero
where padded. A text to generate is many runs of the model, each the next one's input: its first
arrays are text_generation.arrays, and generate/ does the rest.

Law (tested): which other texts share the batch changes an answer by float rounding only. Nothing
here mixes rows, and padded positions never enter a sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from ..contract import Contract
from . import (
    feature_extraction,
    sentence_embedding,
    text_classification,
    text_generation,
    token_classification,
)
from .batch import Array, Batch, encode

__all__ = ["Array", "Batch", "answers", "decode", "encode"]

_TASKS: dict[str, ModuleType] = {
    "sentence-embedding": sentence_embedding,
    "text-classification": text_classification,
    "token-classification": token_classification,
    "feature-extraction": feature_extraction,
    "text-generation": text_generation,
}


def decode(contract: Contract, outputs: Mapping[str, Array], inputs: Mapping[str, Array]) -> Array:
    """The array the task is about, float32; see the module's docstring for its shape.

    outputs: the model's, by name. inputs: what it was given (the attention mask is needed).
    """
    raw = np.asarray(outputs[contract.output], dtype=np.float32)
    mask = np.asarray(inputs["attention_mask"]).astype(bool)
    values: Array = _TASKS[contract.task].decode(contract, raw, mask)
    return values


def answers(contract: Contract, values: Array, batch: Batch) -> list[Any]:
    """One JSON-able answer per text, from decode's array."""
    made: list[Any] = _TASKS[contract.task].answers(contract, values, batch)
    return made
