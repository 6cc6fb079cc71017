"""Apply GPTQ; rounding.py measures H and P."""

from __future__ import annotations

from optimizer.compress.apply.weights.rounding import FloatWeight
from optimizer.compress.methods.weights.gptq import gptq, gptq_on_support
from optimizer.foundation.qtensor import QTensor
from optimizer.recipe.compression.quantize import Quantize


def round_weight(weight: FloatWeight, quantize: Quantize) -> tuple[QTensor, str]:
    """Round by GPTQ; returns (integers, note with the damping that was needed)."""
    assert weight.second_moments is not None
    options, H, P = quantize.gptq, weight.second_moments, weight.cross_moment
    if weight.mask is None:
        rounded = gptq(weight.values, H, weight.scheme, options, P=P, in_place=weight.in_place)
    else:
        if not weight.in_place:
            H, P = H.clone(), None if P is None else P.clone()
        rounded = gptq_on_support(weight.values, H, weight.scheme, weight.mask, options, P)
    remark = f"gptq, damping {rounded.damping:g}"
    if rounded.damping != quantize.gptq.damping:
        remark += f" (asked: {quantize.gptq.damping:g})"
    return rounded.q, remark
