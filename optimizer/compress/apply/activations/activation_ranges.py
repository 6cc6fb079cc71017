"""Choose the static ranges of a segment's quantized inputs, from histograms over all tokens.

Operands of attention have symmetric ranges by mse, because OpenVINO multiplies two tensors of
integers only without a zero point, and clipping pays there (docs/decisions/0013). Probabilities lie
in 0..1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from optimizer.compress.apply.activations.folding import explain_bad_input
from optimizer.compress.methods.activations.activation_ranges import MagnitudeHistogram, get_chooser
from optimizer.compress.walk import blocks as walk
from optimizer.compress.walk.blocks import BlockGroup
from optimizer.foundation.state import Range
from optimizer.model.architectures.operands import find_attention, is_probabilities
from optimizer.recipe.compression.quantize import Activations

OF_OPERANDS = Activations(symmetric=True, range="mse")
"""Options for the ranges of quantized queries, keys and values."""
PROBABILITIES = Range(0.0, 1.0)
OF_CACHES = Activations(type="float8")
"""Options for the ranges of keys and values in a KV cache."""


def choose_ranges(
    group: BlockGroup, activations: Activations, factors: Mapping[str, Tensor]
) -> dict[str, Range]:
    """Choose the activation ranges of a group of blocks from its calibration inputs. A block that
    the model uses several times gets one range per input for all uses.

    factors: {module: factors (in,) that smoothing multiplies its input by}

    Returns {quantized module, or input of a residual Add: range}; those that read one tensor share
    it.
    """
    leader = walk.find_all_sharing(group, "its range is unknown")
    probabilities = {name for name in leader.values() if is_probabilities(name)}
    measured = [name for name in dict.fromkeys(leader.values()) if name not in probabilities]

    def measure(histograms: Mapping[str, MagnitudeHistogram], part: range) -> None:
        def hook(name: str, rows: Tensor, _real: Tensor) -> None:
            try:
                histograms[name].update(rows * factors[name] if name in factors else rows)
            except ValueError as e:
                raise explain_bad_input(name, e) from e

        walk.observe(group, hook, measured, part)

    histograms = group.stream.deal.sum(lambda: {n: MagnitudeHistogram() for n in measured}, measure)
    choose, of_operand = make_range_chooser(activations), make_range_chooser(OF_OPERANDS)
    chosen = {
        name: (of_operand if find_attention(name) else choose)(histogram)
        for name, histogram in histograms.items()
    }
    chosen |= dict.fromkeys(probabilities, PROBABILITIES)
    return {n: chosen[leader[n]] for n in (*group.schemes, *group.summands)}


def choose_cache_ranges(group: BlockGroup) -> dict[str, Range]:
    """Choose {keys or values of a KV cache: range}, which covers all of them."""

    def measure(histograms: Mapping[str, MagnitudeHistogram], part: range) -> None:
        def hook(name: str, rows: Tensor, _real: Tensor) -> None:
            try:
                histograms[name].extend(rows)
            except ValueError as e:
                raise explain_bad_input(name, e) from e

        walk.observe(group, hook, group.caches, part)

    if not group.caches:
        return {}
    histograms = group.stream.deal.sum(
        lambda: {n: MagnitudeHistogram() for n in group.caches}, measure
    )
    choose = make_range_chooser(OF_CACHES)
    return {name: choose(histogram) for name, histogram in histograms.items()}


def make_range_chooser(activations: Activations) -> Callable[[MagnitudeHistogram], Range]:
    """Return the recipe's function from the MagnitudeHistogram of a tensor to its Range."""
    return get_chooser(activations.range, activations.percentile, activations.is_symmetric)
