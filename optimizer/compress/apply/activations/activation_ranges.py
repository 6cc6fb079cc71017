"""Choose the static ranges of a segment's quantized inputs, from histograms over all tokens.

What an attention multiplies has ranges of its own: OpenVINO multiplies two tensors of integers
without a zero point only, and the extremes of values cost more than they are worth
(docs/decisions/0013). Probabilities lie in 0..1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from optimizer.compress.apply.activations.folding import bad_input
from optimizer.compress.methods.activations.activation_ranges import Histogram, chooser
from optimizer.compress.walk import blocks as walk
from optimizer.compress.walk.blocks import BlockGroup
from optimizer.foundation.state import Range
from optimizer.model.architectures.operands import attention_of, is_probabilities
from optimizer.recipe.compression.quantize import Activations

OF_OPERANDS = Activations(symmetric=True, range="mse")
"""How the ranges of queries, keys and values are chosen that are multiplied as integers."""
PROBABILITIES = Range(0.0, 1.0)


def ranges(
    group: BlockGroup, activations: Activations, factors: Mapping[str, Tensor]
) -> dict[str, Range]:
    """One range per module and summand, over all uses of its block; those of one tensor share it.
    factors: {module: what its input is multiplied by first}."""
    leader = walk.sharing_of_all(group, "its range is unknown")
    histograms = {name: Histogram() for name in leader.values()}

    def hook(name: str, rows: Tensor, _real: Tensor) -> None:
        try:
            histograms[name].update(rows * factors[name] if name in factors else rows)
        except ValueError as e:
            raise bad_input(name, e) from e

    probabilities = {name for name in histograms if is_probabilities(name)}
    walk.observe(group, hook, histograms.keys() - probabilities)
    choose, of_operand = range_chooser(activations), range_chooser(OF_OPERANDS)
    chosen = {
        name: (of_operand if attention_of(name) else choose)(histogram)
        for name, histogram in histograms.items()
    }
    chosen |= dict.fromkeys(probabilities, PROBABILITIES)
    return {n: chosen[leader[n]] for n in (*group.schemes, *group.summands)}


def range_chooser(activations: Activations) -> Callable[[Histogram], Range]:
    """The range method of a recipe."""
    return chooser(activations.range, activations.percentile, activations.symmetric)
