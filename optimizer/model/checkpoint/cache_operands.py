"""Attention of a decoder whose keys and values pass through identities on their way into the KV
cache, where they can be quantized.

`install` gives each attention of a transformers model a submodule `kv_cache` with two identities.
They apply to the keys (after rotary embedding) and values of new tokens, in the layout (texts,
tokens, heads * width of a head). Attention then reads what they return, also without a cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor, nn

from optimizer.model.architectures.operands import CACHE, find_attention, find_cache
from optimizer.model.checkpoint import attention_operands
from optimizer.model.checkpoint.attention_operands import Operand

NAMES = ("self_attn", "attention")
"""Last names of attentions whose scales compressed-tensors and vLLM look for."""
ARGUMENT = "past_key_values"


class Cached(nn.Module):
    """Identities in a torch model for the keys and the values of one attention."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value = Operand(), Operand()


class _Filled:
    """Stand-in for a transformers KV cache that passes new keys and values through an attention's
    identities first.

    cache: the cache that stores them; None: nothing is stored, and `update` returns the new ones
    cached: identities of the attention
    """

    def __init__(self, cache: Any, cached: Any) -> None:
        self._cache, self._cached = cache, cached

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Add the keys and values of new tokens to the KV cache of torch, (texts, heads, tokens,
        width); return those of all tokens."""
        key, value = _through(self._cached.key, key), _through(self._cached.value, value)
        return (
            (key, value) if self._cache is None else self._cache.update(key, value, *args, **kwargs)
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def list_attentions(model: nn.Module, blocks: Iterable[str]) -> list[str]:
    """Return the names of the attentions in `blocks` of a torch model that fill a KV cache, in
    order."""
    return [
        f"{block}.{name}"
        for block in blocks
        for name, module in model.get_submodule(block).named_modules()
        if name.rpartition(".")[2] in NAMES
        and ARGUMENT in inspect.signature(module.forward).parameters
    ]


def install(model: nn.Module, names: Iterable[str]) -> None:
    """Add a submodule `kv_cache`, in which keys and values can be quantized, to attentions of
    `model`, in place.

    names: names of their modules
    """
    for name in dict.fromkeys(names):
        attention = model.get_submodule(name)
        setattr(attention, CACHE, Cached())
        attention.register_forward_pre_hook(_fill, with_kwargs=True)


def install_operands(model: nn.Module, names: Collection[str]) -> None:
    """Add the identities through which operands of attentions pass, and keys and values on their
    way into the KV cache, to `model`, in place. There they can be observed and quantized.

    names: names such as "<attention>.operands.query" and "<attention>.kv_cache.key"; others are
        passed over
    """
    if attentions := [*filter(None, map(find_attention, names))]:
        attention_operands.install(model, attentions)
    install(model, filter(None, map(find_cache, names)))


def _fill(attention: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    filled = _Filled(kwargs.get(ARGUMENT), getattr(attention, CACHE))
    return args, {**kwargs, ARGUMENT: filled}


def _through(identity: nn.Module, x: Tensor) -> Tensor:
    """Pass an attention's keys or values x (texts, heads, tokens, width) through an identity that
    takes (texts, tokens, heads * width)."""
    tokens: Tensor = identity(x.transpose(1, 2).flatten(2))
    return tokens.reshape(*tokens.shape[:2], x.shape[1], x.shape[3]).transpose(1, 2)
