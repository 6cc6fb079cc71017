"""Fold factors of smoothing methods into neighbours, pair by pair.

model/architectures/families.py lists the pairs of an architecture: a producer (a norm, a linear)
whose outputs may be divided by the factors of its consumers' inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from optimizer.compress.methods.activations.shared_heads import SharedHeads
from optimizer.compress.module_rows import join_remarks
from optimizer.compress.simulate import set_parameter
from optimizer.compress.walk.blocks import BlockGroup
from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.state import Note, input_name
from optimizer.model.architectures.linear_blocks import SmoothPair
from optimizer.model.graph.module import GraphModel
from optimizer.model.graph.record import BODY


@dataclass
class Folded:
    """Results of smoothing or rotating the inputs of a segment.

    replaced: {parameter: folded float value}
    factors: {module: factor (in,) of its input at run time}
    remarks: {module: note for the report}
    notes: pairs that could not be folded
    """

    replaced: dict[str, Tensor] = field(default_factory=dict)
    factors: dict[str, Tensor] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def add(self, later: Folded) -> None:
        """Merge the results of a later smoothing method on the same modules: its values win,
        remarks join."""
        self.replaced |= later.replaced
        self.factors |= later.factors
        for name, words in later.remarks.items():
            self.remarks[name] = join_remarks(self.remarks.get(name), words)
        self.notes += later.notes

    def replace(self, model: nn.Module, name: str, value: Tensor) -> None:
        """Set the parameter `name` of the float model to its smoothed `value`, and record it among
        the parameters that the state replaces."""
        set_parameter(model, name, value)
        self.replaced[name] = value


def find_foldable_pairs(group: BlockGroup, folded: Folded) -> list[SmoothPair]:
    """The family's pairs in these blocks, under the model's names; `folded` gets a note on each
    pair that cannot be folded."""
    pairs = []
    names = {name for name, _ in group.model.named_modules()}
    whole = isinstance(group.model, GraphModel)  # its parts have no names of modules
    for block in (BODY,) if whole else group.blocks:
        for pair in group.family.smooth:
            consumers = tuple(f"{block}.{c}" for c in pair.consumers)
            producer = f"{block}.{pair.producer}"
            if group.family.uneven and producer not in names:
                continue
            if whole and not any(c in group.schemes for c in consumers):
                continue
            weight = getattr(group.model.get_submodule(producer), "weight", None)
            if weight is None:
                why = f"{producer} has no weight to fold into"
            elif weight.is_meta:  # only weights of the segment are in memory
                why = f"{producer} is computed before this part of the graph"
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


def group_shared_heads(model: nn.Module, values: int, inputs: int) -> SharedHeads | None:
    """Group query heads over value heads, for smoothing values into the output projection; None
    where every query head has a value head.

    values: value channels
    inputs: inputs of the output projection
    """
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


def explain_bad_input(name: str, error: ValueError) -> CheckpointError:
    """Make the CheckpointError for a non-finite calibration input of module `name`, with the
    message of `error`."""
    return CheckpointError(
        str(error),
        where=input_name(name),
        accepted="finite numbers on the calibration data",
        fix="Run the float model on this data: a weight before this module is damaged.",
    )
