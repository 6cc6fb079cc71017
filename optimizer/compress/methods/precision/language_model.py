"""Interface of a language model for methods that need gradients of its logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor, nn

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class LanguageModel:
    """A whole language model in memory, for methods that need its loss.

    features: (batch) -> last hidden states (batch, sequence, features), computed with `linears`
    head: (vocabulary, features); logits are features @ head.T
    norm_weights: {parameter: weight} of the norms, for a method that tunes them
    """

    features: Callable[[Batch], Tensor]
    head: Tensor
    linears: Mapping[str, nn.Linear]
    norm_weights: Mapping[str, nn.Parameter] = field(default_factory=dict)
