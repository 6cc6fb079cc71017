"""A quantized tensor, as one equation:

    value[o, i] = (integers[o, i] - zero_point[o, g]) * scale[o, g]        g = i // group_size

A convolution's weight W[o, c, h, w] is the row value[o, (c * height + h) * width + w].

integers are signed, of `bits` bits, held in int8; `zero_point` None means 0. With type "float8"
they are E4M3 values instead (rounding/float8.py), held in torch.float8_e4m3fn, with "float4" E2M1
values (rounding/float4.py), held alike, with scales that NVFP4 holds. One group
spans the whole row for granularity "channel"; "tensor" has a single scale, shape (1, 1); "block"
has one for each 128 x 128 values, shape (out / 128, in / 128).

**Scale grid.** Every scale is rounded to the bfloat16 grid, inside float16's normal range,
before integers are computed. An integer times such a scale is then the same real number in float32
arithmetic whichever of fp32, fp16 or bf16 a runtime stores the scale in, so "this lowering
is exact" can be asserted with ==. The error does not grow (docs/decisions/0002).

Scales of a checkpoint that is already quantized stay unchanged when all of a tensor are float16
values or all are bfloat16 values: an integer times either is exact in float32, and so is every file
that stores the scale in float32 or in that type. In the other 16-bit type it may be inexact
(`is_exact_in`), which a lowering refuses or declares.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from optimizer.foundation.rounding import float4, float8

Granularity = Literal["tensor", "channel", "group", "block"]
ValueType = Literal["int", "float8", "float4"]

GROUP_SIZES = (16, 32, 64, 128, 256)
"""Group sizes of the usual kernels: powers of two."""
AT_ONCE = 1 << 24  # elements of a slice of rows
BLOCK = 128
"""Rows and columns of a block, as in DeepSeek-V3 and its kernels."""
FP16_SMALLEST_NORMAL = 2.0**-14
FP16_LARGEST_BF16 = 65280.0  # the largest bfloat16 not above float16's 65504


def divides(group_size: int | None, inputs: int) -> bool:
    """Return True where group_size divides a row of `inputs` values; None stands for the entire
    row."""
    return group_size is None or (group_size > 0 and inputs % group_size == 0)


def group_sizes(inputs: int) -> list[int]:
    """Return the usual group sizes that divide a row of `inputs` values."""
    return [size for size in GROUP_SIZES if divides(size, inputs)]


@dataclass(frozen=True)
class Scheme:
    """Format of a quantized weight.

    bits: 8, 4, or 3 (weight-only storage)
    group_size: inputs per scale, only with granularity "group"
    full_range: integers -8..7 without a zero point, and scales of either sign, so that the value
        furthest from 0 may be -8 on either side (4 bits, symmetric; llama.cpp's Q4_0)
    type: "float8": E4M3 values, with 8 bits, symmetric, granularity channel or block; "float4":
        E2M1 values, with 4 bits, symmetric, in groups of 16

    Symmetric schemes use the restricted range (-127..127, -7..7), so that negation is exact, and
    others the full one. Integers read from a quantized checkpoint may use the lowest one too.
    """

    bits: int
    symmetric: bool = True
    granularity: Granularity = "channel"
    group_size: int | None = None
    full_range: bool = False
    type: ValueType = "int"

    def __post_init__(self) -> None:
        of_float4 = (self.bits, self.symmetric, self.group_size) == (4, True, float4.GROUP)
        if self.type == "float4" and not (of_float4 and self.granularity == "group"):
            raise ValueError(
                f"type: float4 with bits {self.bits}, symmetric {self.symmetric}, group_size "
                f"{self.group_size}; accepted: 4 bits, symmetric, groups of {float4.GROUP}"
            )
        of_float8 = self.bits == 8 and self.symmetric and self.granularity in ("channel", "block")
        if self.is_float8 and not of_float8:
            raise ValueError(
                f"type: float8 with bits {self.bits}, symmetric {self.symmetric}, granularity "
                f"{self.granularity}; accepted: 8 bits, symmetric, channel or block"
            )
        if self.granularity == "block" and not self.is_float8:
            raise ValueError("granularity: block belongs to type: float8")
        if self.bits not in (3, 4, 8):
            raise ValueError(f"bits: {self.bits}; accepted: 3, 4, 8")
        if (self.group_size is not None) != (self.granularity == "group"):
            raise ValueError(
                f"group_size: {self.group_size} with granularity {self.granularity!r}; "
                'group_size belongs to granularity "group" and is required there'
            )
        if self.group_size is not None and self.group_size < 1:
            raise ValueError(f"group_size: {self.group_size}; accepted: 1 or more")
        if self.full_range and (self.bits != 4 or not self.symmetric):
            raise ValueError(
                f"full_range: true with bits {self.bits} and symmetric {self.symmetric}; it "
                "belongs to symmetric integers of 4 bits"
            )

    def __str__(self) -> str:
        """Return the name of the scheme, such as "int8 channel", "float8 channel" or "int4 group 32
        asymmetric"."""
        words = [
            self.type if self.is_float else f"int{self.bits}",
            self.granularity,
            str(self.group_size or ""),
        ]
        words += ["full range" if self.full_range else "" if self.symmetric else "asymmetric"]
        return " ".join(filter(None, words))

    @property
    def is_float8(self) -> bool:
        """True where integers stand for E4M3 values."""
        return self.type == "float8"

    @property
    def is_float(self) -> bool:
        """True where integers stand for values of a small float type."""
        return self.type != "int"

    @property
    def dtype(self) -> torch.dtype:
        """Type of the tensor that holds a weight's quantized values."""
        return float8.DTYPE if self.is_float else torch.int8

    @property
    def high(self) -> int:
        """The largest integer, or small float value, that the scheme's weights may have."""
        floats = {"float8": float8.LARGEST, "float4": float4.LARGEST}
        return floats.get(self.type) or int(2 ** (self.bits - 1) - 1)

    @property
    def low(self) -> int:
        """The smallest integer, or small float value, that the scheme's weights may have."""
        restricted = self.symmetric and not self.full_range
        return -self.high if restricted else -self.high - 1

    def shape_of_scale(self, out: int, inputs: int) -> tuple[int, int]:
        """Return the shape of the scales of a weight (out, inputs). Raises ValueError as `groups`
        does, and where 128 does not divide the rows of a weight in blocks."""
        if self.granularity == "tensor":
            return 1, 1
        if self.granularity == "block" and out % BLOCK:
            raise ValueError(f"granularity block: {BLOCK} does not divide {out} rows")
        return out // BLOCK if self.granularity == "block" else out, self.groups(inputs)

    def groups(self, inputs: int) -> int:
        """Return the number of scales per row of `inputs` values. Raises ValueError where
        group_size, or the width of a block, does not divide the row."""
        if self.granularity == "block":
            if inputs % BLOCK:
                raise ValueError(f"granularity block: {BLOCK} does not divide {inputs} inputs")
            return inputs // BLOCK
        if self.group_size is None:
            return 1
        if not divides(self.group_size, inputs):
            raise ValueError(
                f"group_size {self.group_size} does not divide {inputs} inputs; sizes that do: "
                f"{', '.join(map(str, group_sizes(inputs))) or 'none of 16..256'}"
            )
        return inputs // self.group_size


@dataclass(frozen=True)
class QTensor:
    """Quantized tensor, with all parts in memory.

    integers: (out, in) int8; float8_e4m3fn for FP8 and FP4 values
    scale: (out, groups), (1, 1) or one value per block, float32 on the scale grid
    zero_point: int8 of scale's shape; None: 0
    scheme: format of the weight

    Construction checks every invariant and raises ValueError naming the one that is broken.
    """

    integers: Tensor
    scale: Tensor
    zero_point: Tensor | None
    scheme: Scheme

    def __post_init__(self) -> None:
        s = self.scheme
        if self.integers.dtype != s.dtype or self.integers.ndim != 2:
            of = str(s.dtype).removeprefix("torch.")
            raise ValueError(
                f"integers: {self.integers.dtype} {tuple(self.integers.shape)}; must be {of}, 2-D"
            )
        out, inputs = self.integers.shape
        expected = s.shape_of_scale(out, inputs)
        if self.scale.dtype != torch.float32 or tuple(self.scale.shape) != expected:
            raise ValueError(
                f"scale: {self.scale.dtype} {tuple(self.scale.shape)}; must be float32 {expected}"
            )
        usable = self.scale != 0 if s.full_range else self.scale > 0
        if not bool((torch.isfinite(self.scale) & usable).all()):
            sign = "other than 0" if s.full_range else "positive"
            raise ValueError(f"scale: every scale must be finite and {sign}")
        if not is_on_scale_grid(self.scale):
            raise ValueError(
                "scale: not on the bfloat16 grid, nor all float16 values; pass it through "
                "to_scale_grid first"
            )
        if s.symmetric != (self.zero_point is None):
            raise ValueError(
                f"zero_point: {'given' if self.zero_point is not None else 'missing'} "
                f"with symmetric={s.symmetric}"
            )
        if self.zero_point is not None and (
            self.zero_point.dtype != torch.int8 or self.zero_point.shape != self.scale.shape
        ):
            raise ValueError("zero_point: must be int8 with the shape of scale")
        if s.type == "float4":
            if not torch.equal(float4.to_scale_grid(self.scale), self.scale):
                raise ValueError("scale: not an E4M3 value / 256, as NVFP4 stores it")
            if not bool((float4.nearest(self.integers.float()) == self.integers).all()):
                raise ValueError("integers: not E2M1 values")
        if s.is_float:
            if bool(self.integers.isnan().any()):
                raise ValueError("integers: an E4M3 value is NaN")
            return
        lowest = -s.high - 1
        for name, t in (("integers", self.integers), ("zero_point", self.zero_point)):
            if t is not None and t.numel() and (int(t.min()) < lowest or int(t.max()) > s.high):
                raise ValueError(f"{name}: outside {lowest}..{s.high} of {s.bits} bits")

    def dequantize(self, rows: slice = slice(None)) -> Tensor:
        """Return the values (out, in) float32, by the module's equation; only those of `rows`, if
        given."""
        integers = self.integers[rows]
        out = len(self.integers)
        values = integers.float().reshape(len(integers), self._groups, -1)
        if self.zero_point is not None:
            values -= expand_rows(self.zero_point, out)[rows].float()[..., None]
        return values.mul_(expand_rows(self.scale, out)[rows][..., None]).reshape(integers.shape)

    def rows(self, rows: slice) -> QTensor:
        """Return some rows as a QTensor, without a copy. Raises ValueError where rows share a
        scale."""
        if len(self.scale) != len(self.integers):
            raise ValueError("scale: several rows share one")
        zero = None if self.zero_point is None else self.zero_point[rows]
        return QTensor(self.integers[rows], self.scale[rows], zero, self.scheme)

    def slices(self) -> list[slice]:
        """Return slices of rows with about AT_ONCE elements each; one slice of all rows where these
        share a scale."""
        rows, inputs = self.integers.shape
        many = rows if len(self.scale) != rows else max(1, AT_ONCE // inputs)
        return [slice(first, min(first + many, rows)) for first in range(0, rows, many)]

    def nonzero(self) -> Tensor:
        """Return a mask (out, in) of the values other than 0, that is, of integers other than the
        zero point."""
        if self.zero_point is None:
            return self.integers != 0
        grouped = self.integers.reshape(len(self.integers), self._groups, -1)
        return (grouped != self.zero_point[..., None]).reshape(self.integers.shape)

    def to(self, device: torch.device) -> QTensor:
        """Return the quantized tensor on a device; itself if it is there already."""
        if self.integers.device == device:
            return self
        zero = None if self.zero_point is None else self.zero_point.to(device)
        return QTensor(self.integers.to(device), self.scale.to(device), zero, self.scheme)

    @property
    def _groups(self) -> int:
        return int(self.scale.shape[1])


def expand_rows(scale: Tensor, out: int) -> Tensor:
    """Repeat scales or zero points such that each of `out` rows has its own: (out, groups)."""
    return scale if len(scale) == out else scale.repeat_interleave(out // len(scale), 0)


def grouped(values: Tensor, scheme: Scheme) -> Tensor:
    """Arrange values (out, in) such that those with one scale lie along the last axis: (*shape of
    scale, values per scale)."""
    rows, groups = scheme.shape_of_scale(*values.shape)
    parts = values.reshape(rows, len(values) // rows, groups, -1).transpose(1, 2)
    return parts.reshape(rows, groups, -1)


def stack(parts: Iterable[QTensor], rows: int) -> QTensor:
    """Stack the rows of several matrices. They are read one after another into the memory of the
    result.

    rows: total number of rows

    Raises ValueError for several matrices with one scale for all of their rows.
    """
    integers, scales, zeros, at = torch.empty(0), [], [], 0
    for q in parts:
        if len(q.integers) == rows:
            return q
        if not at:
            integers = q.integers.new_empty(rows, q.integers.shape[1])
        integers[at : at + len(q.integers)] = q.integers
        at += len(q.integers)
        scales.append(q.scale)
        zeros += [] if q.zero_point is None else [q.zero_point]
    zero = torch.cat(zeros) if zeros else None
    return QTensor(integers, torch.cat(scales), zero, q.scheme)


def to_scale_grid(scale: Tensor) -> Tensor:
    """Round scales to the nearest bfloat16 value in float16's normal range, as float32. Idempotent.

    A NaN stays NaN, so that it is refused later.
    """
    return scale.clamp(FP16_SMALLEST_NORMAL, FP16_LARGEST_BF16).to(torch.bfloat16).float()


def scheme_scales(scale: Tensor, scheme: Scheme) -> Tensor:
    """Round scales to values that the scheme can store, keeping their signs."""
    of_float4 = scheme.type == "float4"
    return float4.to_scale_grid(scale) if of_float4 else to_signed_scale_grid(scale)


def to_signed_scale_grid(scale: Tensor) -> Tensor:
    """Round magnitudes as to_scale_grid does, keeping their signs."""
    return torch.copysign(to_scale_grid(scale.abs()), scale)


def is_exact_in(scale: Tensor, dtype: torch.dtype) -> bool:
    """Return True where every scale is a value of `dtype`, so that storing it in `dtype` is
    exact."""
    return torch.equal(scale.to(dtype).float(), scale)


def is_on_scale_grid(scale: Tensor) -> bool:
    """Return True where all scales are bfloat16 values, or all are float16 values.

    Results of to_scale_grid are both; scales of a quantized checkpoint may be only one.
    """
    return is_exact_in(scale, torch.bfloat16) or is_exact_in(scale, torch.float16)


def absmax_scale(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor | None]:
    """Return (scale, zero point or None) that just cover the values of each group, as
    round-to-nearest needs.

    weight: (out, in) float32

    The scale has the shape Scheme.shape_of_scale and lies on the scale grid; the zero point has the
    same shape. A group of zeros gets the smallest scale and integers of zero. With full_range the
    value furthest from 0 is on the side of the integer -8. Raises ValueError for a weight that FP4
    cannot hold.
    """
    rows = grouped(weight, scheme)
    if scheme.full_range:
        below, above = -rows.amin(-1), rows.amax(-1)
        far, near = torch.maximum(below, above), torch.minimum(below, above)
        cover = to_scale_grid(torch.maximum(far / -scheme.low, near / scheme.high))
        return torch.where(above > below, -cover, cover), None
    if scheme.type == "float4" and (largest := float(weight.abs().max())) > float4.COVERED:
        raise ValueError(f"weight: holds {largest:.4g}; FP4 holds weights up to {float4.COVERED}")
    if scheme.symmetric:
        return scheme_scales(rows.abs().amax(-1) / scheme.high, scheme), None
    low, high = rows.amin(-1).clamp(max=0), rows.amax(-1).clamp(min=0)
    scale = to_scale_grid((high - low) / (scheme.high - scheme.low))
    zero_point = (scheme.low - low / scale).round().clamp(scheme.low, scheme.high)
    return scale, zero_point.to(torch.int8)


def quantize(weight: Tensor, scale: Tensor, zero_point: Tensor | None, scheme: Scheme) -> QTensor:
    """Round each value to the nearest integer, or float value, of the given scales (ties to even).

    weight (out, in) float32; scale and zero_point as in QTensor, scale already on the grid.
    Raises ValueError when the weight holds NaN or infinity.
    """
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("weight: holds NaN or infinity")
    out, inputs = weight.shape
    groups = int(scale.shape[1])
    integers = weight.float().reshape(out, groups, -1) / expand_rows(scale, out)[..., None]
    if zero_point is not None:
        integers = integers + expand_rows(zero_point, out).float()[..., None]
    integers = round_to(integers, scheme)
    return QTensor(integers.reshape(out, inputs), scale, zero_point, scheme)


def round_to(values: Tensor, scheme: Scheme) -> Tensor:
    """Round values that were divided by their scales to the nearest integers (int8), or to the
    nearest values of the scheme's small float type."""
    if scheme.type == "float4":
        return float4.nearest(values)
    if scheme.is_float8:
        return float8.nearest(values)
    return values.round().clamp(scheme.low, scheme.high).to(torch.int8)
