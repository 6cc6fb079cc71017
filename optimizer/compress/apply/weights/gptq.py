"""Apply GPTQ; rounding.py measures H and P."""

from __future__ import annotations

from optimizer.compress.apply.weights.rounding import FloatWeight
from optimizer.compress.methods.weights.gptq import gptq
from optimizer.foundation.qtensor import QTensor
from optimizer.recipe.compression.quantize import Quantize


def round_weight(weight: FloatWeight, quantize: Quantize) -> tuple[QTensor, str]:
    """Round by GPTQ; the note gives the damping that was needed."""
    assert weight.second_moments is not None
    rounded = gptq(
        weight.values,
        weight.second_moments,
        weight.scheme,
        quantize.gptq,
        P=weight.cross_moment,
        mask=weight.mask,
        in_place=weight.in_place,
    )
    remark = f"gptq, damping {rounded.damping:g}"
    if rounded.damping != quantize.gptq.damping:
        remark += f" (asked: {quantize.gptq.damping:g})"
    return rounded.q, remark
