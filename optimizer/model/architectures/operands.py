"""Names of the operands of an encoder's attention in a state: "<attention>.operands.query"."""

from __future__ import annotations

from optimizer.foundation.state import CompressedState, Range

HOLDER = "operands"
"""The submodule of an attention whose children are identities on its operands."""
PROBABILITIES = "probabilities"
OPERANDS = ("query", "key", "value", PROBABILITIES)


def attention_of(module: str) -> str:
    """The attention's module name, if `module` is the name of one of its operands; else ""."""
    holder, _, name = module.rpartition(".")
    attention, _, last = holder.rpartition(".")
    return attention if last == HOLDER and name in OPERANDS else ""


def is_probabilities(module: str) -> bool:
    """True for a module name "<attention>.operands.probabilities" (the softmax's output)."""
    return bool(attention_of(module)) and module.endswith(f".{PROBABILITIES}")


def operands_of(state: CompressedState) -> dict[str, Range]:
    """{operand's module name: activation range} of the attentions' operands in state.summands."""
    return {name: r for name, r in state.summands.items() if attention_of(name)}
