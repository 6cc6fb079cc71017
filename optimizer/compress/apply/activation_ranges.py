"""Choose the static ranges of a segment's quantized inputs, from histograms over all tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from optimizer.compress.apply.folding import bad_input
from optimizer.compress.methods.activation_ranges import Histogram, chooser
from optimizer.compress.walk import blocks as walk
from optimizer.compress.walk.blocks import BlockGroup
from optimizer.recipe.quantize import Activations
from optimizer.state import Range


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

    walk.observe(group, hook, histograms)
    choose = range_chooser(activations)
    chosen = {name: choose(histogram) for name, histogram in histograms.items()}
    return {n: chosen[leader[n]] for n in (*group.schemes, *group.summands)}


def range_chooser(activations: Activations) -> Callable[[Histogram], Range]:
    """The range method of a recipe."""
    return chooser(activations.range, activations.percentile, activations.symmetric)
