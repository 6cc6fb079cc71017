"""From texts to arrays and from outputs to answers, one file per task.

    batch   = encode(contract, tokenizer, texts)          arrays the model takes
    outputs = runner.infer(batch)
    values  = decode(contract, outputs, batch)            the array the task is about
    results = answers(contract, values, batch)            one JSON object per text

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
from ..errors import AnswerError
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
    Raises AnswerError for NaN or infinity where a token is real.
    """
    raw = np.asarray(outputs[contract.output], dtype=np.float32)
    mask = np.asarray(inputs["attention_mask"]).astype(bool)
    _check_finite(contract.output, raw, mask)
    values: Array = _TASKS[contract.task].decode(contract, raw, mask)
    return values


def _check_finite(name: str, raw: Array, mask: Array) -> None:
    wrong = ~np.isfinite(raw)
    if not wrong.any():  # the usual case, and cheap
        return
    if raw.shape[:2] == mask.shape:
        wrong &= mask.reshape(*mask.shape, *[1] * (raw.ndim - 2))
    rows = np.flatnonzero(wrong.reshape(len(raw), -1).any(1))
    if len(rows):
        raise AnswerError(
            f"{int(wrong.sum())} of its numbers are NaN or infinite, in row {rows[0]} first",
            where=f"output {name}",
        )


def answers(contract: Contract, values: Array, batch: Batch) -> list[dict[str, Any]]:
    """One JSON object per text, from decode's array: what is in it, the task's file says."""
    made: list[dict[str, Any]] = _TASKS[contract.task].answers(contract, values, batch)
    return made
