"""Attention of an encoder whose operands pass through identities, where they can be quantized.

    probabilities = softmax(query key^T * scaling + mask)        output = probabilities value

`install` gives each attention of a transformers model a submodule `operands` with four identities.
They apply to query, key and value in the layout of their linear layers, (texts, tokens, width), and
to the probabilities, (texts, heads, queries, keys). The result equals eager attention.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from optimizer.model.architectures.operands import HOLDER

NAME = "optimize attention operands"


class Operand(nn.Identity):
    """Identity in a torch model through which one operand of an attention passes, so that a
    quantizer can replace it."""


class Operands(nn.Module):
    """Identities in a torch model of the four operands of one attention, with the names in
    operands.OPERANDS."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = Operand(), Operand(), Operand()
        self.probabilities = Operand()


def install(model: Any, attentions: Iterable[str]) -> None:
    """Add a submodule `operands`, in which operands of products can be quantized, to attentions of
    `model`, in place.

    attentions: names of their modules
    """
    for name in dict.fromkeys(attentions):
        setattr(model.get_submodule(name), HOLDER, Operands())
    model.set_attn_implementation(_register())


def _register() -> str:
    """Register `attention`, whose operands pass through identities, with transformers, which looks
    it up by name; return the name."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, eager_mask)
    return NAME


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Compute a torch model's eager attention with operands that pass through the identities;
    return (output, probabilities).

    query, key, value: (texts, heads, tokens, width of a head)
    mask: added to the scores before the softmax; None: no mask
    scaling: factor of the scores

    The output is (texts, tokens, heads, width of a head), the probabilities (texts, heads, queries,
    keys).
    """
    operands: Any = getattr(module, HOLDER)
    q, k, v = (
        _heads(getattr(operands, name)(_tokens(x)), x)
        for name, x in (("query", query), ("key", key), ("value", value))
    )
    scores = (q @ k.transpose(2, 3)) * scaling
    if mask is not None:
        scores = scores + mask
    probabilities: Tensor = operands.probabilities(scores.softmax(-1))
    mixed = (probabilities @ v).transpose(1, 2)
    return mixed.contiguous(), probabilities


def _tokens(x: Tensor) -> Tensor:
    """Reshape an attention's operand from (texts, heads, tokens, width) to (texts, tokens, heads *
    width)."""
    return x.transpose(1, 2).flatten(2)


def _heads(x: Tensor, like: Tensor) -> Tensor:
    """Reshape an attention's operand from (texts, tokens, heads * width) to the shape of `like`,
    (texts, heads, tokens, width)."""
    return x.reshape(*x.shape[:2], like.shape[1], like.shape[3]).transpose(1, 2)
