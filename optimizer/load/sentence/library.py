"""Decide if the sentence-transformers library can be run beside a model, and make texts for it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from optimizer.load.preparation import Described
from optimizer.load.tokenizer import tokenizer
from optimizer.model.checkpoint.model import parameter_shapes

NAME = "sentence_transformers"
LARGEST = 500_000_000  # parameters up to which the model is run twice
TOGETHER = 32  # rows of a batch, the library's default
LONGEST = 512  # tokens up to which an input that is cut is compared


def is_installed() -> bool:
    """True if the library can be imported; it is not imported here."""
    return find_spec(NAME) is not None


def why_not_run(d: Described) -> str:
    """Reason why the library is not run; "" if it is."""
    if not is_installed():
        return "sentence-transformers is not installed, so the answers cannot be compared"
    if d.section.gguf_file is not None:
        return "sentence-transformers does not read GGUF files"
    count = sum(torch.Size(shape).numel() for shape in parameter_shapes(d.model).values())
    if count > LARGEST:
        return f"{count:,} parameters are too many to run the model beside sentence-transformers"
    return ""


def batch_size(tokenizer: Any) -> int:
    """Rows per batch of the library's reference answers: 1 for a tokenizer that pads on the left,
    because that shifts learned positions and an answer would depend on the other rows.

    tokenizer: transformers'
    """
    return 1 if getattr(tokenizer, "padding_side", "") == "left" else TOGETHER


def draw_words(encoder: Any, number: int) -> list[str]:
    """Words of the tokenizer's own vocabulary, from up to `number` ids at equal distances; those of
    English sentences where it has none. encoder: the harness's tokenizer"""
    count = encoder.get_vocab_size()
    ids = np.linspace(0, count - 1, num=min(count, number)).astype(int)
    drawn = dict.fromkeys(encoder.decode([int(i)]).strip() for i in ids)
    return [word for word in drawn if word.isalpha()] or " ".join(tokenizer.TEXTS).split()
