"""A language model as a method sees it that needs gradients of its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class LanguageModel:
    """features(batch): what the head reads for the batch's input_ids and attention_mask, (batch,
    sequence, features), computed with `linears`. head (vocabulary, features): logits are
    features @ head.T."""

    features: Callable[[Batch], Tensor]
    head: Tensor
    linears: Mapping[str, nn.Linear]
