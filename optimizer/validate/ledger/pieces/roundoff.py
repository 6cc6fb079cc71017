"""Bound the rounding error of one linear module, element by element.

A rounding moves a value by at most `unit` of itself, half the distance between neighbours at 1
(Higham, Accuracy and Stability of Numerical Algorithms, 2.1). With independent roundings the error
of a sum of n products stays within

    lambda sqrt(n) unit sum |x_i w_i|        with probability 1 - 2 n exp(-lambda^2 / 2)

in any order of summation (Higham and Mary 2019, "A new approach to probabilistic rounding error
analysis", theorem 3.1); lambda follows from the number of sums and MISSED. Integer sums are exact.
No bound depends on a model's values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from optimizer.foundation.conv_geometry import ConvGeometry, flatten_positions
from optimizer.foundation.rounding.tolerance import UNIT as UNIT

Array = NDArray[Any]
Floats = NDArray[np.float64]

SMALLEST = {"fp32": 2.0**-150, "fp16": 2.0**-25, "bf16": 2.0**-134}
"""Half the distance between subnormal neighbours: the rounding of the smallest values."""
MISSED = 1e-9
"""Probability that the bounds of one module refuse correct arithmetic."""
AT_ONCE = 1 << 19  # outputs, and weights, at a time: few enough for a core's cache


def bound_deviations(sums: int, terms: int) -> float:
    """Compute the lambda with which `sums` sums of `terms` terms of a judged piece all stay inside
    their bounds, except with probability MISSED."""
    return math.sqrt(2 * math.log(2 * max(sums, 1) * max(terms, 1) / MISSED))


class MatrixRows(Protocol):
    """A judged product's matrix (out, in) that is read by slices of rows: an array, or one computed
    on demand."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, rows: slice, /) -> Array: ...


@dataclass(frozen=True)
class ModuleProduct:
    """A module's product y = x weight^T + bias that is judged, with the roundings that its kernel
    makes."""

    weight: MatrixRows  # (out, in), exact
    bias: Array | None  # (out,) as stored, or None
    out: str  # type of the product and the result
    integer: bool = False  # sums are of integers, so exact, and only the epilogue rounds
    operands: int = 0  # number of operands rounded to `out`'s type before the product
    scaled: bool = False  # x was multiplied by a factor first, in float32
    block: int = 0  # inputs per block that the kernel quantizes to int8; 0 for none
    filters: ConvGeometry | None = None  # of a convolution, whose output places are the tokens

    def times(self, x: Array, weight: Array) -> Array:
        """Compute x weight^T (places, out), in the type of x.

        x: (tokens, in), or images of a convolution

        It is computed by torch, on the threads of the caller; numpy's library has threads of its
        own.
        """
        inputs, weights = torch.from_numpy(x), torch.from_numpy(weight.astype(x.dtype, copy=False))
        if self.filters is None:
            return (inputs @ weights.T).numpy()
        return flatten_positions(self.filters.conv2d(inputs, weights)).numpy()

    def outputs(self, output: Array) -> Array:
        """Reshape a graph's output to (places, out)."""
        if self.filters is None:
            return output.reshape(-1, output.shape[-1])
        return flatten_positions(torch.from_numpy(output)).numpy()

    @property
    def together(self) -> bool:
        """True where all outputs must be computed at once and not slice by slice."""
        return self.filters is not None and self.filters.groups > 1

    @property
    def limit(self) -> str:
        """Sentence that names the bound of the product's error, for the report."""
        sums = "exact integer sums" if self.integer else "float32 sums"
        more = f", {self.operands} operands in {self.out}" if self.operands else ""
        more += f", inputs in int8 blocks of {self.block}" if self.block else ""
        return f"{sums} of {self.weight.shape[1]}{more}, result in {self.out}: bound per element"


def compute_parts(x: Floats, product: ModuleProduct) -> Iterator[tuple[slice, Floats, Floats]]:
    """Yield (slice of outputs, exact result, bound) of a judged product for a few outputs at a
    time; results and bounds are (tokens, outputs) float64.

    x: (tokens, in) or images, as multiplied: integers times their step
    """
    outputs, inputs = product.weight.shape
    tokens = (
        len(x) if product.filters is None else len(product.times(x[:1], product.weight[:])) * len(x)
    )
    step = outputs if product.together else max(1, AT_ONCE // max(tokens, inputs, 1))
    wide = bound_deviations(tokens * outputs, inputs)
    coarse = _block_variance(x, product.block) if product.block else None
    for part in (slice(i, min(i + step, outputs)) for i in range(0, outputs, step)):
        weight = product.weight[part].astype(np.float64)
        total = product.times(x, weight)
        exact = total if product.bias is None else total + product.bias[part].astype(np.float64)
        chosen = replace(product, weight=weight)
        yield part, exact, _bound(x, chosen, (total, exact), wide, coarse)


def compute_ratio(value: Floats, exact: Floats, bound: Floats) -> Floats:
    """Compute |error| / bound of every element of a judged piece; infinite, which is beyond any
    limit, where the value or its bound is not a finite number."""
    finite = np.isfinite(value) & np.isfinite(bound)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(finite, np.abs(value - exact) / bound, np.inf))


def _bound(
    x: Floats,
    product: ModuleProduct,
    sums: tuple[Floats, Floats],
    wide: float,
    coarse: Floats | None,
) -> Floats:
    """Compute the bound (tokens, outputs) of the error of a judged piece's product.

    sums: exact results without and with the bias
    wide: lambda of bound_deviations
    coarse: variance of int8 blocks (tokens, blocks); None: inputs are not quantized in blocks
    """
    weight, unit, inputs = product.weight[:], UNIT[product.out], product.weight.shape[1]
    size = np.abs(sums[0])
    # the epilogue stores the product and its sum with the bias once each, and once more where a
    # kernel converts between types
    bound = 1.5 * unit * (size + np.abs(sums[1])) + SMALLEST[product.out]
    if product.integer:
        # int32 -> float, times the step of the input, times that of the output.
        bound += 3 * UNIT["fp32"] * size
    else:
        small = product.times(np.abs(x).astype(np.float32), np.abs(weight).astype(np.float32))
        bound += wide * math.sqrt(inputs) * UNIT["fp32"] * small
    rounded = product.operands * unit**2 + product.scaled * UNIT["fp32"] ** 2
    if rounded:
        squares = product.times(
            np.square(x).astype(np.float32), np.square(weight).astype(np.float32)
        )
        bound += wide * np.sqrt(rounded * squares.astype(np.float64))
    if coarse is not None:
        squares = weight**2
        blocks = np.add.reduceat(squares, np.arange(0, inputs, product.block), axis=1)
        bound += wide * np.sqrt(coarse @ blocks.T)
    return bound


def _block_variance(x: Floats, block: int) -> Floats:
    """Compute, for a piece's bound, the variance (tokens, blocks) of rounding x to int8 by the
    largest value of each block. A uniform error is sub-Gaussian with its own variance, step^2 /
    12."""
    largest = np.maximum.reduceat(np.abs(x), np.arange(0, x.shape[1], block), axis=1)
    return np.asarray((largest / 127) ** 2 / 12)
