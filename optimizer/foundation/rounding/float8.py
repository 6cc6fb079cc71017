"""Values of FP8 E4M3 (torch.float8_e4m3fn): 4 bits of exponent, 3 of mantissa, no infinity.

From 0 to 2^-6 the step is 2^-9; above there are 8 values per power of two, up to 448.
"""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE = torch.float8_e4m3fn
LARGEST = 448
_MANTISSA, _LEAST_EXPONENT = 3, -6


def nearest(values: Tensor) -> Tensor:
    """Round to the nearest E4M3 values, ties to even; values beyond 448 become 448 of their
    sign."""
    return values.clamp(-LARGEST, LARGEST).to(DTYPE)


def spacing(
    values: Tensor, mantissa: int = _MANTISSA, least_exponent: int = _LEAST_EXPONENT
) -> Tensor:
    """Return the distance between the two E4M3 values around each value. For an E4M3 value it is
    the distance to the next one away from 0.

    mantissa: bits of the mantissa, for another float type
    least_exponent: exponent of the smallest normal value, for another float type
    """
    least = 2.0**least_exponent  # below it the steps are equal
    exponent = torch.frexp(values.abs().clamp(least, LARGEST)).exponent - 1 - mantissa
    return torch.ldexp(torch.ones_like(values), exponent)


def steps_away(
    values: Tensor,
    rounded: Tensor,
    mantissa: int = _MANTISSA,
    least_exponent: int = _LEAST_EXPONENT,
) -> Tensor:
    """Return the distance of each value from an E4M3 value, divided by the distance from that to
    its neighbour on the value's side. It is at most 0.5 for the nearest E4M3 value.

    values: real numbers, at most 448 in magnitude
    rounded: E4M3 values
    mantissa, least_exponent: as in `spacing`
    """
    near = rounded.to(values.dtype)
    outward = (values - near) * torch.where(near == 0, values, near) >= 0
    # toward 0, the neighbour of a power of two is half as far as the one away from 0
    half = torch.frexp(near.abs()).mantissa == 0.5
    half &= near.abs() > 2.0**least_exponent
    gap = spacing(near, mantissa, least_exponent) * torch.where(half & ~outward, 0.5, 1.0)
    return (values - near).abs() / gap
