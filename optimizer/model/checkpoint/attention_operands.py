"""An encoder's attention whose operands pass through modules, so that they can be quantized there.

    probabilities = softmax(query key^T * scaling + mask)        output = probabilities value

transformers has no module at these four places. `install` gives each attention a submodule
`operands` with an identity for each; the attention of this file applies them: to query, key and
value as their linear layers give them, (texts, tokens, width), and to the probabilities, (texts,
heads, queries, keys). The function stays that of transformers' eager attention.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from optimizer.model.architectures.operands import HOLDER, attention_of

NAME = "optimize attention operands"


class Operand(nn.Identity):
    """What is multiplied, handed on as it is."""


class Operands(nn.Module):
    """The four of one attention, named as operands.OPERANDS."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = Operand(), Operand(), Operand()
        self.probabilities = Operand()


def install(model: Any, attentions: Iterable[str]) -> None:
    """Give the modules of these names in `model`, a transformers model, their operands."""
    for name in dict.fromkeys(attentions):
        setattr(model.get_submodule(name), HOLDER, Operands())
    model.set_attn_implementation(_register())


def with_operands(model: nn.Module, operands: Iterable[str]) -> nn.Module:
    """A copy of `model` that shares its parameters and has these operands; itself without any."""
    attentions = [attention_of(name) for name in operands]
    if not attentions:
        return model
    twin = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
    install(twin, attentions)
    return twin


def _register() -> str:
    """Make it known to transformers, which takes attentions by name only, and return the name."""
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
    """query, key, value (texts, heads, tokens, width of a head) -> (texts, tokens, heads, width),
    and the probabilities."""
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
    """(texts, tokens, heads * width) of (texts, heads, tokens, width)."""
    return x.transpose(1, 2).flatten(2)


def _heads(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of _tokens."""
    return x.reshape(*x.shape[:2], like.shape[1], like.shape[3]).transpose(1, 2)
