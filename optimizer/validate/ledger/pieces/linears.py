"""Build the reference of each linear module of a graph: the quantizer of its input and its
product.

    compressed state, dialect of the lowering -> module -> Linear, for pieces.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from torch import Tensor

from optimizer import targets
from optimizer.foundation.conv_geometry import NO_EXTRA
from optimizer.foundation.qtensor import QTensor
from optimizer.foundation.state import Range, input_name, weight_name
from optimizer.lower.onnx import attention_operands
from optimizer.model.architectures.operands import find_attention
from optimizer.validate.ledger.distance import Array
from optimizer.validate.ledger.pieces.pieces import Linear
from optimizer.validate.ledger.pieces.quantizer import Quantizer
from optimizer.validate.ledger.pieces.roundoff import UNIT, MatrixRows, ModuleProduct
from optimizer.validate.materials import Materials


@dataclass(frozen=True)
class Dequantized:
    """A reference weight (out, in) that is de-quantized by slices of rows, because a decoder's head
    may be larger than ten blocks.

    factor: multiplier of the columns (in,), that of the module's input; None: 1
    """

    weight: QTensor
    factor: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.weight.integers.shape)

    def __getitem__(self, rows: slice) -> Array:
        values: Array = self.weight.dequantize(rows).numpy()
        return values if self.factor is None else values * self.factor.numpy().astype(np.float64)


STORED = {"fp32": np.float32, "fp16": np.float16}


def read_float_graph(m: Materials) -> Callable[[str], Linear]:
    """Return a function module -> reference for the float graph: parameters as stored, inputs in
    float."""

    def linear(module: str) -> Linear:
        def product() -> ModuleProduct:
            weight = _stored(m.folded_parameters[f"{module}.weight"].flatten(1), m.precision)
            bias = m.folded_bias(module)
            stored = None if bias is None else _stored(bias, m.precision)
            return ModuleProduct(weight, stored, m.precision, filters=m.filters(module))

        return Linear(None, product)

    return linear


def read_lowered_graph(m: Materials, fused: bool) -> Callable[[str], Linear]:
    """Return a function module -> reference for the lowered graph.

    fused: True for the kernels that operators are fused to; False for operators as written
    """

    @cache  # a quantizer is read for every trace; no Linear holds a weight
    def linear(module: str) -> Linear:
        name = f"{module}.weight"
        if module in m.state.summands:
            return Linear(_static(m, module, fused), _no_product)
        if name not in m.state.weights:
            return read_float_graph(m)(module)
        return _quantized(m, module, fused)

    return linear


def _quantized(m: Materials, module: str, fused: bool) -> Linear:
    """Make the reference (quantizer and product) of one module of the lowered graph; for arguments
    see read_lowered_graph."""
    mode, factor = m.state.activations_of(module), m.state.factor_of(module)
    coarse = m.precision != "fp32"

    def values() -> tuple[MatrixRows, Array | None]:
        return Dequantized(m.state.weight_of(module)), compute_stored_bias(m, module)

    def weight_only() -> ModuleProduct:
        weight = Dequantized(m.state.weight_of(module), factor)
        block = m.kernel_blocks.get(module, 0) if fused and not coarse else 0
        rounded = (1 + (factor is not None)) * coarse
        return ModuleProduct(
            weight,
            compute_stored_bias(m, module),
            m.precision,
            operands=rounded,
            scaled=factor is not None,
            block=block,
        )

    if mode is None:
        return Linear(None, weight_only)
    if mode == "token":
        return Linear(
            per_token(factor), lambda: ModuleProduct(*values(), m.precision, integer=True)
        )
    quantizer = _static(m, module, fused)
    float_kernels = (m.inspected.get("inspected") or {}).get("wider", [])
    integer = fused and not coarse and module not in float_kernels
    operands, filters = 2 if coarse else 0, m.filters(module)
    if filters is not None and quantizer.offset:  # its input is padded before it is quantized
        filters = replace(filters, padding=(0, 0), extra_padding=NO_EXTRA)
    return Linear(
        quantizer,
        lambda: ModuleProduct(
            *values(),
            m.precision,
            # ORT fuses an integer Conv only before another quantizer, which no piece has
            integer=integer and filters is None,
            operands=operands,
            filters=filters,
        ),
    )


def _static(m: Materials, module: str, fused: bool) -> Quantizer:
    """Make the ledger's reference of the quantizer at the input of a module or of a residual add,
    from the state's static range."""
    factor, covered = m.state.factor_of(module), m.state.ranges[input_name(module)]
    signed = m.signed or (bool(find_attention(module)) and attention_operands.is_signed(covered))
    quantizer = static(covered, factor, signed, m.precision)
    if fused and targets.look_up(m.section.target.runtime).kernels.reciprocal:
        return replace(quantizer, reciprocal=True)
    return quantizer


def _no_product() -> ModuleProduct:
    raise ValueError("inputs of a residual add are not multiplied")


def static(covered: Range, factor: Tensor | None, signed: bool, precision: str) -> Quantizer:
    """Make the reference quantizer of one range.

    covered: the range
    factor: multiplier of the input (in,); None: 1
    signed: True for the dialect without zero points, which subtracts the range's offset, in float32
        whatever the graph's precision
    precision: type of the graph's floats
    """
    factors = None if factor is None else factor.numpy()
    if not signed:
        return Quantizer(covered.scale, covered.zero_point, 0, 255, UNIT["fp32"], factor=factors)
    moved = factors is not None or covered.offset != 0
    unit = UNIT["fp32"] if moved else UNIT[precision]
    return Quantizer(covered.scale, 0, -128, 127, unit, covered.offset, factors)


def per_token(factor: Tensor | None) -> Quantizer:
    """Make the reference quantizer whose step follows from the largest value of each row.

    factor: multiplier of the input (in,); None: 1
    """
    factors = None if factor is None else factor.numpy()
    return Quantizer(None, 128, 0, 255, UNIT["fp32"], factor=factors)


def compute_stored_bias(m: Materials, module: str) -> Array | None:
    """Compute the expected bias (out,) that the lowered graph must store, in its type; None for a
    module without one. The share of an offset is added to the float graph's bias, which is then
    rounded once more."""
    bias = m.folded_bias(module)
    stored = None if bias is None else _stored(bias, m.precision)
    covered = m.state.range_of(module) if m.state.activations_of(module) == "tensor" else None
    moved = m.signed and weight_name(module) in m.state.weights
    if not moved or covered is None or not covered.offset:
        return stored
    shift = covered.offset * m.state.weight_of(module).dequantize().double().sum(1).numpy()
    total = shift if stored is None else stored.astype(np.float64) + shift
    return np.asarray(total.astype(STORED[m.precision]))


def _stored(value: Tensor, precision: str) -> Array:
    return np.asarray(value.detach().float().numpy().astype(STORED[precision], copy=False))
