"""What a piece of a graph that multiplies is given, so that what it multiplies is known exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from optimizer.lower.onnx.cut import Edge
from optimizer.validate.ledger.distance import Array
from optimizer.validate.ledger.pieces import quantizer, roundoff
from optimizer.validate.ledger.pieces.quantizer import Quantizer

Multiplied = tuple[dict[str, Array], roundoff.Floats]
"""What a piece is given for one use, and the values that are multiplied (tokens, in)."""
Inputs = Callable[[Edge, Array, Quantizer | None, Any], Multiplied]


def _as_float(edge: Edge, array: Array, kind: Any) -> Multiplied:
    """Of a module whose input stays float. kind: the element type that the piece takes."""
    x = shaped(array, edge.input_rank).astype(kind or np.float32)
    return {edge.input: x}, _multiplied(edge, x, array).astype(np.float64)


def _multiplied(edge: Edge, values: Array, like: Array) -> Array:
    """(tokens, in), or images as they are."""
    return values.reshape(like.shape if edge.convolves else (-1, like.shape[-1]))


def integers(edge: Edge, array: Array, q: Quantizer | None, kind: Any) -> Multiplied:
    """The integers themselves, of the quantizer q; of None as _as_float."""
    if q is None or not edge.integers:
        return _as_float(edge, array, kind)
    whole, exact = quantizer.integers(array.reshape(-1, array.shape[-1]), q)
    codes = whole.astype(np.uint8 if q.low == 0 else np.int8)
    shaped_codes: Array = codes.reshape(array.shape)
    if edge.sides:
        shaped_codes = _padded(shaped_codes, edge.sides, quantizer.of_zero(q))
    inputs = {edge.integers: _for_integers(shaped_codes, edge)}
    step = exact.astype(np.float32)
    if edge.step:
        inputs[edge.step] = _for_integers(step.reshape(*array.shape[:-1], 1), edge)
    values = np.asarray((whole - q.zero_point) * step.astype(np.float64))
    images = _multiplied(edge, values, array)
    if edge.sides:  # as the product pads no more
        images = _padded(images, edge.sides, -q.offset)
    return inputs, np.asarray(images, np.float64)


def unpadded(images: Array, sides: Sequence[int]) -> tuple[Array, Array]:
    """(what was padded, the values it was padded with)."""
    if not sides:
        return images, images[:0]
    top, left, bottom, right = sides
    height, width = images.shape[2:]
    inside = np.zeros(images.shape, bool)
    inside[:, :, top : height - bottom, left : width - right] = True
    inner = images[:, :, top : height - bottom, left : width - right]
    return np.ascontiguousarray(inner), images[~inside]


def _padded(images: Array, sides: Sequence[int], value: float) -> Array:
    top, left, bottom, right = sides
    return np.pad(images, ((0, 0), (0, 0), (top, bottom), (left, right)), constant_values=value)


def middles(edge: Edge, array: Array, q: Quantizer | None, kind: Any) -> Multiplied:
    """The float in the middle of each integer, which rounding leaves there."""
    if q is None or not edge.integers:
        return _as_float(edge, array, kind)
    whole, step = quantizer.integers(array.reshape(-1, array.shape[-1]), q)
    values = (whole - q.zero_point) * step
    moved = values + q.offset if q.factor is None else (values + q.offset) / q.factor
    x = np.asarray(moved, np.float32).reshape(array.shape)
    multiplied = _multiplied(edge, np.asarray(values), array)
    return {edge.input: shaped(x, edge.input_rank)}, np.asarray(multiplied, np.float64)


def shaped(array: Array, rank: int) -> Array:
    """(batch, sequence, width) as the graph has it there: perhaps flattened to rank 2."""
    if array.ndim == rank:
        return array
    return array.reshape(-1, array.shape[-1]) if rank == 2 else array.reshape(rank * (1,))


def placed(output: Array, edge: Edge) -> Array:
    """A module's (batch, sequence, width) as the graph goes on with it."""
    array = shaped(output, edge.output_rank)
    return array.swapaxes(0, 1) if edge.sequence_first else array


def read_back(array: Array, edge: Edge) -> Array:
    """What the graph has at a module's input, as (batch, sequence, width)."""
    return array.swapaxes(0, 1) if edge.sequence_first else array


def _for_integers(array: Array, edge: Edge) -> Array:
    """As shaped, of what a module's input is quantized to: of rank 3 again where a lowering made
    it so (lower/ort/rank.py)."""
    as_read = shaped(array, edge.input_rank)
    return as_read[None] if as_read.ndim < edge.integers_rank else as_read
