"""An attention for text that a decoder writes token by token on a CPU: one query at a time.

Where heads share keys they are the rows of one product, so that no key is copied for them
(docs/decisions/0016).
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

NAME = "optimize one query"
Answer = tuple[Tensor, Tensor | None]


def register() -> str:
    """Make it known to transformers, which takes attentions by name only, and return the name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **more: Any
) -> Answer:
    """query (texts, heads, queries, width), key and value (texts, fewer heads, tokens, width) ->
    (texts, queries, heads, width). What has more queries than one, or a mask, goes to torch."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    plain = more.get("scaling") is not None and more.get("position_bias") is None
    if query.shape[2] > 1 or mask is not None or not plain:
        return cast(Answer, sdpa_attention_forward(module, query, key, value, mask, **more))
    rows = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
    scores = (rows @ key.transpose(2, 3)).float() * more["scaling"]
    mixed = scores.softmax(-1).to(value.dtype) @ value
    return mixed.reshape(len(query), 1, -1, value.shape[-1]), None
