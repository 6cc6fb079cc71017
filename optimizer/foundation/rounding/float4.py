"""Values of FP4 E2M1: 0, 0.5, 1, 1.5, 2, 3, 4 and 6 of either sign; and NVFP4's scales.

Values are held in torch.float8_e4m3fn, which has all of them. Codes are those of NVFP4: the sign,
then the number of the magnitude in the list above.

A scale of NVFP4 is an E4M3 value over a float32 number for the whole tensor. Here that number is
GLOBAL_SCALE for every tensor, because vLLM takes the largest one of the parts of a fused layer for
all of them. So scales are E4M3 values / 256: 2^-14 to 1.75, with 2^-17 as the least step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optimizer.foundation.rounding import float8

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST = 6
GROUP = 16
GLOBAL_SCALE = 256.0
COVERED = LARGEST * float8.LARGEST / GLOBAL_SCALE
"""Largest magnitude of a weight: 10.5."""
_LEAST_SCALE = 2.0**-9 / GLOBAL_SCALE
_MANTISSA, _LEAST_EXPONENT = 1, 0


def nearest(values: Tensor) -> Tensor:
    """Round to the nearest E2M1 values, ties to the even position in the list; values beyond 6
    become 6 of their sign."""
    inside, step = values.clamp(-LARGEST, LARGEST), spacing(values)
    return ((inside / step).round() * step).to(float8.DTYPE)


def spacing(values: Tensor) -> Tensor:
    """Return the distance between neighbouring E2M1 values at each value, as float8.spacing does
    for E4M3. Beyond the largest value it is the distance of the last two."""
    return float8.spacing(values.clamp(-LARGEST, LARGEST), _MANTISSA, _LEAST_EXPONENT)


def steps_away(values: Tensor, rounded: Tensor) -> Tensor:
    """Return the distance of each value from an E2M1 value, in steps, as float8.steps_away does for
    E4M3."""
    return float8.steps_away(values, rounded, _MANTISSA, _LEAST_EXPONENT)


def to_scale_grid(scale: Tensor) -> Tensor:
    """Round scales to the nearest positive scales that NVFP4 can store. Idempotent."""
    stored = float8.nearest(scale * GLOBAL_SCALE).float()
    return (stored / GLOBAL_SCALE).clamp(min=_LEAST_SCALE)


def quantize_inputs(x: Tensor, global_scale: float) -> Tensor:
    """Quantize and de-quantize each GROUP values of x (..., features) to NVFP4 with a scale of
    their own: their largest magnitude / LARGEST, as an E4M3 value / global_scale. A scale of 0
    makes zeros."""
    groups = x.unflatten(-1, (-1, GROUP))
    scale = input_scales(groups, global_scale)
    scaled = groups / torch.where(scale > 0, scale, torch.ones_like(scale))
    values = nearest(scaled).to(x.dtype) * scale
    return values.flatten(-2)


def input_scales(groups: Tensor, global_scale: float) -> Tensor:
    """Return the NVFP4 scale (..., 1) of each group of inputs (..., GROUP)."""
    wide = groups.abs().amax(-1, keepdim=True) / LARGEST * global_scale
    return float8.nearest(wide).to(groups.dtype) / global_scale


def pack(values: Tensor) -> Tensor:
    """Pack E2M1 values (out, in) into uint8 (out, in / 2), the first of a pair in the low bits."""
    table = torch.tensor(MAGNITUDES, device=values.device)
    wide = values.float()
    codes = torch.bucketize(wide.abs(), table) + 8 * wide.signbit()
    return (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """Unpack bytes to E2M1 values (out, in), the inverse of `pack`."""
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1).long()
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], device=packed.device)
    return table[codes].to(float8.DTYPE)
