"""Apply rounding to nearest, without calibration."""

from __future__ import annotations

from optimizer.compress.apply.weights.rounding import FloatWeight
from optimizer.compress.methods.weights.rtn import rtn
from optimizer.foundation.qtensor import QTensor
from optimizer.recipe.compression.quantize import Quantize


def round_weight(weight: FloatWeight, _quantize: Quantize) -> tuple[QTensor, str]:
    """Round a weight to nearest; returns (integers, ""): there is nothing to note."""
    return rtn(weight.kept, weight.scheme), ""
