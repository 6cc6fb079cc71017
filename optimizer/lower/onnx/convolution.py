"""Convolutions in both Q/DQ dialects, and what residual adds and pooling read.

    p_codes [O, I, H, W] int8    p_scale [O]    DequantizeLinear axis=0

ONNX Runtime runs Conv between a DequantizeLinear of each operand and a QuantizeLinear of its
output as QLinearConv, which sums integers from an int32 bias: `name/bias_codes`, whose step is the
input's times the weight's. Its padding is the zero point, which is 0.

TensorRT's dialect has no zero point, so an input is centred by its range's offset
(lower/trt/qdq.py), and the padding of a Conv, 0, would be the offset: an operator before
QuantizeLinear pads the centred 0.

An identity in front of a residual add, of pooling or of a float activation is found by the
operators that names.json has for it; what it reads goes through a DQ of its own for these alone.
Its Q is that of a convolution that reads the same, so that ONNX Runtime finds one Q behind the add
before, and fuses that as QLinearAdd. Behind a MaxPool it has its own: a single one would be moved
in front, and MaxPool of uint8 takes many times longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from optimizer.export.names import Names, Use
from optimizer.foundation.errors import OptimizeError
from optimizer.foundation.qtensor import QTensor
from optimizer.foundation.state import Range
from optimizer.lower.onnx.qdq import Surgeon

OPERATOR = "Conv"
SLOW_IN_INTEGERS = "MaxPool"
BIAS = 2  # which of its inputs


def integer_bias(surgeon: Surgeon, product: ir.Node, name: str, q: QTensor, covered: Range) -> None:
    """Give a Conv its bias as integers. Raises OptimizeError for one that no integers stand for."""
    bias = product.inputs[BIAS] if len(product.inputs) > BIAS else None
    if bias is None:
        return
    assert bias.const_value is not None
    value = bias.const_value.numpy().astype(np.float32)
    step = q.scale[:, 0].numpy().astype(np.float64) * covered.scale
    codes = np.rint(value / step).astype(np.float32).astype(np.int32)
    scale = step.astype(np.float32)
    if not np.array_equal(codes.astype(np.float32) * scale, value):
        raise OptimizeError(
            f"{name}.bias is not made of steps of the input times those of the weight",
            where="lower: ort_qdq",
            fix="Run the compress stage again.",
        )
    operands: list[ir.Value | None] = [
        surgeon.constant(f"{name}/bias_codes", codes),
        surgeon.constant(f"{name}/bias_scale", scale),
    ]
    dequantized = surgeon.insert(
        product, "DequantizeLinear", operands, f"{name}/bias", name, axis=0
    )
    product.replace_input_with(BIAS, dequantized)


def shift_bias(surgeon: Surgeon, product: ir.Node, name: str, shift: NDArray[Any]) -> None:
    """Add that to the bias of a Conv, in an initializer of its own. shift (out,) float64."""
    if len(product.inputs) <= BIAS:
        product.resize_inputs(BIAS + 1)
    bias = product.inputs[BIAS]
    if bias is not None:
        assert bias.const_value is not None
        shift = bias.const_value.numpy().astype(np.float64) + shift
    product.replace_input_with(BIAS, surgeon.number(f"{name}/bias", shift))


def take_padding(product: ir.Node) -> tuple[int, ...]:
    """The sides of a Conv's padding as Pad has them, (0, 0, top, left, 0, 0, bottom, right), which
    it no longer pads by itself; () where there is none, or of another operator."""
    before = product.attributes.get_ints("pads", ()) if product.op_type == OPERATOR else ()
    if not any(before):
        return ()
    half = len(before) // 2
    product.attributes["pads"] = ir.AttrInt64s("pads", [0] * len(before))
    return (0, 0, *before[:half], 0, 0, *before[half:])


def summands(surgeon: Surgeon, names: Names, ranges: Mapping[str, Range], *, signed: bool) -> None:
    """Quantize what residual adds, pooling and float activations read. ranges: {module of
    names.summands: range}."""
    for name, covered in ranges.items():
        uses = names.summands.get(name)
        if uses is None:
            raise OptimizeError(
                f"the state has a range of {name}, which has no quantized weight and is not among "
                "the summands of names.json",
                where="lower",
                fix="Run the compress and export stages again.",
            )
        readers = [_reader(surgeon, name, use) for use in uses]
        first, place = readers[0]
        value = first.inputs[place]
        assert value is not None
        through = _centred if signed else _unsigned
        handed_on = through(surgeon, first, name, value, covered)
        for reader, place in readers:
            reader.replace_input_with(place, handed_on)


def _reader(surgeon: Surgeon, name: str, use: Use) -> tuple[ir.Node, int]:
    """The operator of a use, and which of its inputs that is."""
    node = surgeon.nodes[use.node]
    places = [i for i, v in enumerate(node.inputs) if v is not None and v.name == use.input]
    if len(places) != 1:
        raise OptimizeError(
            f"{name} hands on {use.input}, which {use.node} does not read once", where="lower"
        )
    return node, places[0]


def _unsigned(
    surgeon: Surgeon, add: ir.Node, name: str, value: ir.Value, covered: Range
) -> ir.Value:
    """Through the integers that a convolution reads of the same tensor, if one does."""
    maker = value.producer()
    shared = surgeon.inputs.get((value, covered.scale, covered.zero_point))
    if shared is not None and (maker is None or maker.op_type != SLOW_IN_INTEGERS):
        operands = list(shared.producer().inputs)
        return surgeon.insert(add, "DequantizeLinear", operands, f"{name}/input", name)
    scale = surgeon.number(f"{name}/input_scale", covered.scale)
    zero = surgeon.constant(f"{name}/input_zero_point", np.array(covered.zero_point, np.uint8))
    codes = surgeon.insert(add, "QuantizeLinear", [value, scale, zero], f"{name}/input_codes", name)
    return surgeon.insert(add, "DequantizeLinear", [codes, scale, zero], f"{name}/input", name)


def _centred(
    surgeon: Surgeon, add: ir.Node, name: str, value: ir.Value, covered: Range
) -> ir.Value:
    """Through int8 of what the range's offset is taken from, which is added again."""
    wide = bool(covered.offset) and surgeon.float_type != "float32"
    single = np.float32

    def constant(what: str, number: float) -> ir.Value:
        return surgeon.constant(f"{name}/{what}", np.asarray(number, single))

    if wide:
        to = int(ir.DataType.FLOAT)
        value = surgeon.insert(add, "Cast", [value], f"{name}/float32", name, to=to)
    if covered.offset:
        offset = constant("offset", covered.offset)
        value = surgeon.insert(add, "Sub", [value, offset], f"{name}/centred", name)
    scale = surgeon.number(f"{name}/input_scale", covered.scale)
    step = constant("step", covered.scale) if wide else scale
    kind = int(ir.DataType.INT8)
    codes = surgeon.insert(
        add, "QuantizeLinear", [value, step], f"{name}/input_codes", name, output_dtype=kind
    )
    result = surgeon.insert(add, "DequantizeLinear", [codes, scale], f"{name}/input", name)
    if covered.offset:
        back = surgeon.number(f"{name}/offset_back", covered.offset)
        result = surgeon.insert(add, "Add", [result, back], f"{name}/moved_back", name)
    return result
