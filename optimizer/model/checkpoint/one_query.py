"""Attention for decoding token by token on a CPU: one query per text.

Query heads that share a key/value head become the rows of one matrix product, so that keys are not
copied (docs/decisions/0016).
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

NAME = "optimize one query"
Answer = tuple[Tensor, Tensor | None]


def register() -> str:
    """Register `attention`, for decoding on a CPU, with transformers, which looks it up by name;
    return the name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **more: Any
) -> Answer:
    """Compute a torch model's attention for one query per text, on a CPU; several queries, or a
    mask, are left to torch.

    query: (texts, heads, queries, width of a head)
    key, value: (texts, key/value heads, tokens, width of a head)

    The output is (texts, queries, heads, width of a head).
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    plain = more.get("scaling") is not None and more.get("position_bias") is None
    if query.shape[2] > 1 or mask is not None or not plain:
        return cast(Answer, sdpa_attention_forward(module, query, key, value, mask, **more))
    rows = query.reshape(len(query), key.shape[1], -1, query.shape[-1])
    scores = (rows @ key.transpose(2, 3)).float() * more["scaling"]
    mixed = scores.softmax(-1).to(value.dtype) @ value
    return mixed.reshape(len(query), 1, -1, value.shape[-1]), None
