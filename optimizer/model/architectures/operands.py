"""Names of the operands of an attention in a state: "<attention>.operands.query" of an encoder's,
"<attention>.kv_cache.key" of what a decoder's cache holds."""

from __future__ import annotations

from optimizer.foundation.state import CompressedState, Range

HOLDER = "operands"
"""The submodule of an attention whose children are identities on its operands."""
PROBABILITIES = "probabilities"
OPERANDS = ("query", "key", "value", PROBABILITIES)
CACHE = "kv_cache"
"""The submodule of an attention whose children are identities on new keys and values."""
CACHED = ("key", "value")


def find_attention(module: str) -> str:
    """The attention's module name, if `module` is the name of one of its operands; else ""."""
    holder, _, name = module.rpartition(".")
    attention, _, last = holder.rpartition(".")
    return attention if last == HOLDER and name in OPERANDS else ""


def find_cache(module: str) -> str:
    """The attention's module name, if `module` names keys or values of its KV cache; else ""."""
    holder, _, name = module.rpartition(".")
    attention, _, last = holder.rpartition(".")
    return attention if last == CACHE and name in CACHED else ""


def select_caches(state: CompressedState) -> dict[str, Range]:
    """{name of keys or values of a KV cache: range} in state.summands."""
    return {name: r for name, r in state.summands.items() if find_cache(name)}


def is_probabilities(module: str) -> bool:
    """True for a module name "<attention>.operands.probabilities" (the softmax's output)."""
    return bool(find_attention(module)) and module.endswith(f".{PROBABILITIES}")


def select_operands(state: CompressedState) -> dict[str, Range]:
    """{operand's module name: activation range} of the attentions' operands in state.summands."""
    return {name: r for name, r in state.summands.items() if find_attention(name)}
