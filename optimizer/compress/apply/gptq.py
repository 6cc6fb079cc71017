"""Apply GPTQ: the second moments of a weight's inputs, and what earlier errors ask of it, come from
the walk (rounding.py)."""

from __future__ import annotations

from optimizer.compress.apply.rounding import FloatWeight
from optimizer.compress.methods.gptq import GptqOptions, gptq
from optimizer.qtensor import QTensor
from optimizer.recipe.quantize import Quantize


def round_weight(weight: FloatWeight, quantize: Quantize) -> tuple[QTensor, str]:
    """The integers, and the damping that was needed."""
    assert weight.second_moments is not None
    section = quantize.gptq
    rounded = gptq(
        weight.values,
        weight.second_moments,
        weight.scheme,
        GptqOptions(section.act_order, section.damping, section.max_scale_ratio),
        P=weight.cross_moment,
        in_place=weight.in_place,
    )
    remark = f"gptq, damping {rounded.damping:g}"
    if rounded.damping != section.damping:
        remark += f" (asked: {section.damping:g})"
    return rounded.q, remark
