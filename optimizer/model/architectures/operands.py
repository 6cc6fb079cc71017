"""Names of the tensors inside an attention that can be quantized, as keys of a compressed state:
"<attention>.operands.query" (also key, value, probabilities) in an encoder, and
"<attention>.kv_cache.key" (also value) for the KV cache of a decoder."""

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
    """Return the attention's module name, if `module` is the architecture's name of an operand of
    an encoder's attention; else ""."""
    holder, _, name = module.rpartition(".")
    attention, _, last = holder.rpartition(".")
    return attention if last == HOLDER and name in OPERANDS else ""


def find_cache(module: str) -> str:
    """Return the attention's module name, if `module` is the architecture's name of keys or values
    of a KV cache; else ""."""
    holder, _, name = module.rpartition(".")
    attention, _, last = holder.rpartition(".")
    return attention if last == CACHE and name in CACHED else ""


def select_caches(state: CompressedState) -> dict[str, Range]:
    """Return {name of keys or values of a KV cache: activation range} of a compressed state."""
    return {name: r for name, r in state.summands.items() if find_cache(name)}


def is_probabilities(module: str) -> bool:
    """Return True for "<attention>.operands.probabilities", the name of the softmax's output."""
    return bool(find_attention(module)) and module.endswith(f".{PROBABILITIES}")


def select_operands(state: CompressedState) -> dict[str, Range]:
    """Select the attention operands, such as queries, that a state quantizes: {name: activation
    range}."""
    return {name: r for name, r in state.summands.items() if find_attention(name)}
