"""Decide if the sentence-transformers library can be run beside a model, and make texts for it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from optimizer.harness.process import memory
from optimizer.load.preparation import Described
from optimizer.load.tokenizer import tokenizer
from optimizer.model.checkpoint.model import list_parameter_shapes

NAME = "sentence_transformers"
LARGEST = 500_000_000  # parameters up to which the model is run twice, whatever memory is free
BYTES = 8  # per parameter while it is: our model in float64
SPARE = 2  # multiple of that that must be free for a larger model
FEWER = 4  # a larger model answers this fraction of the texts
TOGETHER = 32  # rows of a batch, the library's default
LONGEST = 512  # tokens up to which an input that is cut is compared


def is_installed() -> bool:
    """Return True if sentence-transformers can be imported for load's comparison; it is not
    imported here."""
    return find_spec(NAME) is not None


def explain_not_run(d: Described) -> str:
    """Return the reason why sentence-transformers is not run to compare its vectors with ours; ""
    if it is."""
    if not is_installed():
        return "sentence-transformers is not installed, so the answers cannot be compared"
    if d.section.gguf_file is not None:
        return "sentence-transformers does not read GGUF files"
    count = count_parameters(d)
    if not fits(count):
        left = (memory.read_free() or 0) / 1e9
        return (
            f"{count:,} parameters take {BYTES * count / 1e9:.0f} GB to compare with "
            f"sentence-transformers, and of the {left:.0f} GB that are free half are used at most"
        )
    return ""


def count_parameters(d: Described) -> int:
    """Count the parameters of the model that is loaded, as its config describes it."""
    return sum(torch.Size(shape).numel() for shape in list_parameter_shapes(d.model).values())


def fits(count: int) -> bool:
    """Return True where a model of `count` parameters is compared with sentence-transformers, which
    takes a second copy: up to LARGEST, and more where this machine has the memory."""
    return count <= LARGEST or SPARE * BYTES * count <= (memory.read_free() or 0)


def predict_seconds(count: int) -> float:
    """Predict the seconds of the comparison with sentence-transformers; 0 up to LARGEST parameters.

    About 500 tokens are computed, with two operations per parameter and token, 10 billion a second.

    count: parameters of the model
    """
    return 0.0 if count <= LARGEST else 2 * 500 * count / 1e10


def limit_texts(number: int, d: Described) -> int:
    """Return how many texts load compares with sentence-transformers: `number`, or fewer for a
    model above LARGEST."""
    return number if count_parameters(d) <= LARGEST else max(number // FEWER, 3)


def choose_batch_size(tokenizer: Any) -> int:
    """Choose the rows per batch of the library's reference answers at load: 1 for a tokenizer that
    pads on the left, because that shifts learned positions and an answer would depend on the other
    rows.

    tokenizer: transformers'
    """
    return 1 if getattr(tokenizer, "padding_side", "") == "left" else TOGETHER


def draw_words(encoder: Any, number: int) -> list[str]:
    """Draw words for load's comparison from the tokenizer's own vocabulary, at up to `number` ids
    at equal distances; those of English sentences where it has none. encoder: the harness's
    tokenizer"""
    count = encoder.get_vocab_size()
    ids = np.linspace(0, count - 1, num=min(count, number)).astype(int)
    drawn = dict.fromkeys(encoder.decode([int(i)]).strip() for i in ids)
    return [word for word in drawn if word.isalpha()] or " ".join(tokenizer.TEXTS).split()
