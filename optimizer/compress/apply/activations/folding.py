"""What smoothing methods share: factors that fold into a neighbour, pair by pair.

model/architectures/families.py lists the pairs of an architecture: a producer (a norm, a linear)
whose outputs may be divided by what its consumers' inputs are multiplied by.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from optimizer.compress.methods.activations.shared_heads import SharedHeads
from optimizer.compress.module_rows import joined
from optimizer.compress.simulate import set_parameter
from optimizer.compress.walk.blocks import BlockGroup
from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.state import Note, input_name
from optimizer.model.architectures.linear_blocks import SmoothPair


@dataclass
class Folded:
    """replaced: {parameter: folded float value}; factors: {module: (in,)}; remarks: {module: what
    the report says}; notes: pairs that could not be folded."""

    replaced: dict[str, Tensor] = field(default_factory=dict)
    factors: dict[str, Tensor] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def add(self, later: Folded) -> None:
        """What was done after this, to the same modules."""
        self.replaced |= later.replaced
        self.factors |= later.factors
        for name, words in later.remarks.items():
            self.remarks[name] = joined(self.remarks.get(name), words)
        self.notes += later.notes

    def replace(self, model: nn.Module, name: str, value: Tensor) -> None:
        """Give the model's parameter another value."""
        set_parameter(model, name, value)
        self.replaced[name] = value


def pairs_of(group: BlockGroup, folded: Folded) -> list[SmoothPair]:
    """The family's pairs that exist in these blocks, under the model's own names; the others are
    noted in `folded`."""
    pairs = []
    names = {name for name, _ in group.model.named_modules()}
    for block in group.blocks:
        for pair in group.family.smooth:
            consumers = tuple(f"{block}.{c}" for c in pair.consumers)
            producer = f"{block}.{pair.producer}"
            if group.family.uneven and producer not in names:
                continue
            if getattr(group.model.get_submodule(producer), "weight", None) is None:
                why = f"{producer} has no weight to fold into"
            elif not all(c in group.schemes for c in consumers):
                why = "another consumer of the same input is kept in float"
            else:
                pairs.append(replace(pair, producer=producer, consumers=consumers))
                continue
            folded.notes += [
                Note(c, "fallback", f"smoothing not folded: {why}")
                for c in consumers
                if c in group.schemes
            ]
    return pairs


def shared_heads(model: nn.Module, values: int, inputs: int) -> SharedHeads | None:
    """How value heads are shared by query heads; None when each query head has its own."""
    if values == inputs:
        return None
    heads = int(model.config.num_attention_heads)  # type: ignore[union-attr, arg-type]
    if inputs % values or inputs % heads:
        raise CheckpointError(
            f"{values} value channels do not serve {inputs} attention outputs evenly",
            where="config.json",
            fix="Report the architecture; until then use methods that fold nothing: rtn, gptq.",
        )
    return SharedHeads(inputs // values, inputs // heads)


def bad_input(name: str, error: ValueError) -> CheckpointError:
    """The message for activations that are not finite."""
    return CheckpointError(
        str(error),
        where=input_name(name),
        accepted="finite numbers on the calibration data",
        fix="Run the float model on this data: a weight before this module is damaged.",
    )
