"""Put arrays into the shapes that a piece of a graph reads, and its outputs into those of torch.

edge, array of torch -> inputs of the piece, values that it multiplies
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from optimizer.lower.onnx.cut import Edge
from optimizer.validate.ledger.distance import Array
from optimizer.validate.ledger.pieces import quantizer, roundoff
from optimizer.validate.ledger.pieces.quantizer import Quantizer

Multiplied = tuple[dict[str, Array], roundoff.Floats]
"""(inputs of a piece for one use, the values that it multiplies (tokens, in))."""
Inputs = Callable[[Edge, Array, Quantizer | None, Any], Multiplied]


def _as_float(edge: Edge, array: Array, kind: Any) -> Multiplied:
    """Make the inputs of a judged piece whose input stays float: ({input of the piece: array},
    values that it multiplies).

    kind: element type that the piece accepts
    """
    x = shape_input(array, edge.input_rank).astype(kind or np.float32)
    return {edge.input: x}, _multiplied(edge, x, array).astype(np.float64)


def _multiplied(edge: Edge, values: Array, like: Array) -> Array:
    """Shape a judged piece's values as (tokens, in); of a convolution as `like`, an image."""
    return values.reshape(like.shape if edge.convolves else (-1, like.shape[-1]))


def give_integers(edge: Edge, array: Array, q: Quantizer | None, kind: Any) -> Multiplied:
    """Make the inputs of a judged piece that begins behind its quantizer: the integers themselves.
    Returns ({input of the piece: array}, values that it multiplies).

    array: input of the module in torch
    q: the quantizer; None: the input stays float
    kind: element type that the piece accepts
    """
    if q is None or not edge.integers:
        return _as_float(edge, array, kind)
    whole, exact = quantizer.compute_integers(array.reshape(-1, array.shape[-1]), q)
    codes = whole.astype(np.uint8 if q.low == 0 else np.int8)
    shaped_codes: Array = codes.reshape(array.shape)
    if edge.sides:
        shaped_codes = _padded(shaped_codes, edge.sides, quantizer.quantize_zero(q))
    inputs = {edge.integers: _for_integers(shaped_codes, edge)}
    step = exact.astype(np.float32)
    if edge.step:
        inputs[edge.step] = _for_integers(step.reshape(*array.shape[:-1], 1), edge)
    values = np.asarray((whole - q.zero_point) * step.astype(np.float64))
    images = _multiplied(edge, values, array)
    if edge.sides:  # the product does not pad
        images = _padded(images, edge.sides, -q.offset)
    return inputs, np.asarray(images, np.float64)


def remove_padding(images: Array, sides: Sequence[int]) -> tuple[Array, Array]:
    """Split the padded images that a piece reads: (images without padding, the values of the
    padding).

    sides: rows or columns of padding at the (top, left, bottom, right); (): none
    """
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


def give_middles(edge: Edge, array: Array, q: Quantizer | None, kind: Any) -> Multiplied:
    """Make the inputs of a judged piece that includes its quantizer: for each integer the float in
    its middle, which is rounded to that integer only. Returns ({input of the piece: array}, values
    that it multiplies).

    array: input of the module in torch
    q: the quantizer; None: the input stays float
    kind: element type that the piece accepts
    """
    if q is None or not edge.integers:
        return _as_float(edge, array, kind)
    whole, step = quantizer.compute_integers(array.reshape(-1, array.shape[-1]), q)
    values = (whole - q.zero_point) * step
    moved = values + q.offset if q.factor is None else (values + q.offset) / q.factor
    x = np.asarray(moved, np.float32).reshape(array.shape)
    multiplied = _multiplied(edge, np.asarray(values), array)
    return {edge.input: shape_input(x, edge.input_rank)}, np.asarray(multiplied, np.float64)


def shape_input(array: Array, rank: int) -> Array:
    """Reshape a module's input (batch, sequence, width) to the `rank` axes that the judged piece
    reads; rank 2 is (batch x sequence, width)."""
    if array.ndim == rank:
        return array
    return array.reshape(-1, array.shape[-1]) if rank == 2 else array.reshape(rank * (1,))


def place_output(output: Array, edge: Edge) -> Array:
    """Convert a module's output in torch (batch, sequence, width) to the layout in which a judged
    piece reads it."""
    array = shape_input(output, edge.output_rank)
    return array.swapaxes(0, 1) if edge.sequence_first else array


def read_back(array: Array, edge: Edge) -> Array:
    """Convert the tensor that a judged graph has at a module's input to torch's layout (batch,
    sequence, width)."""
    return array.swapaxes(0, 1) if edge.sequence_first else array


def _for_integers(array: Array, edge: Edge) -> Array:
    """Shape a quantized input as the piece reads it: with three axes where a lowering added one
    (lower/ort/rank.py)."""
    as_read = shape_input(array, edge.input_rank)
    return as_read[None] if as_read.ndim < edge.integers_rank else as_read
