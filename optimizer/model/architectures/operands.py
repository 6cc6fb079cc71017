"""What an encoder's attention multiplies, as modules of a state: "<attention>.operands.query"."""

from __future__ import annotations

from optimizer.foundation.state import CompressedState, Range

HOLDER = "operands"
"""The submodule of an attention whose children hand on what it multiplies."""
PROBABILITIES = "probabilities"
OPERANDS = ("query", "key", "value", PROBABILITIES)


def attention_of(module: str) -> str:
    """The attention that multiplies what this module hands on; "" of another module."""
    holder, _, name = module.rpartition(".")
    attention, _, last = holder.rpartition(".")
    return attention if last == HOLDER and name in OPERANDS else ""


def is_probabilities(module: str) -> bool:
    """Whether it hands on what a softmax gives."""
    return bool(attention_of(module)) and module.endswith(f".{PROBABILITIES}")


def operands_of(state: CompressedState) -> dict[str, Range]:
    """{module: range} of the state's summands that attentions multiply."""
    return {name: r for name, r in state.summands.items() if attention_of(name)}
