"""Lower convolutions and the operands of residual adds and pooling, in both Q/DQ dialects.

    p_codes [O, I, H, W] int8    p_scale [O]    DequantizeLinear axis=0

ONNX Runtime runs Conv between a DequantizeLinear of each operand and a QuantizeLinear of its
output as QLinearConv, which sums integers from an int32 bias: `name/bias_codes`, whose step is the
input's times the weight's. Its padding is the zero point, which is 0.

TensorRT's dialect has no zero point, so an input is centred by its range's offset
(lower/trt/qdq.py). The padding of a Conv, 0, would then be the offset, so a Pad before
QuantizeLinear adds the centred 0.

A residual add, a pooling or a float activation reads through an identity's separate DQ, at the
operators that names.json lists. Its Q is shared with a convolution that reads the same tensor, so
that ONNX Runtime finds one Q behind the add before and fuses it to QLinearAdd. Behind a MaxPool of
floats the Q is separate: ONNX Runtime would move a shared one in front, and MaxPool of uint8 is
slow, unless convolutions of integers lie before it (docs/decisions/0044).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from optimizer.export.names import GraphNames, OperatorInput
from optimizer.foundation.errors import OptimizeError
from optimizer.foundation.qtensor import QTensor
from optimizer.foundation.state import Range
from optimizer.lower.onnx.qdq import Surgeon

OPERATOR = "Conv"
SLOW_IN_INTEGERS = "MaxPool"
BIAS = 2  # index of the input


def add_integer_bias(
    surgeon: Surgeon, product: ir.Node, name: str, q: QTensor, covered: Range
) -> None:
    """Quantize a Conv's bias to int32. Raises OptimizeError for a bias that is not whole steps."""
    bias = product.inputs[BIAS] if len(product.inputs) > BIAS else None
    if bias is None:
        return
    assert bias.const_value is not None
    value = bias.const_value.numpy().astype(np.float32)
    step = q.scale[:, 0].numpy().astype(np.float64) * covered.scale
    integers = np.rint(value / step).astype(np.float32).astype(np.int32)
    scale = step.astype(np.float32)
    if not np.array_equal(integers.astype(np.float32) * scale, value):
        raise OptimizeError(
            f"{name}.bias is not a multiple of the input's step times the weight's",
            where="lower: ort_qdq",
            fix="Run the compress stage again.",
        )
    operands: list[ir.Value | None] = [
        surgeon.constant(f"{name}/bias_codes", integers),
        surgeon.constant(f"{name}/bias_scale", scale),
    ]
    dequantized = surgeon.insert(
        product, "DequantizeLinear", operands, f"{name}/bias", name, axis=0
    )
    product.replace_input_with(BIAS, dequantized)


def shift_bias(surgeon: Surgeon, product: ir.Node, name: str, shift: NDArray[Any]) -> None:
    """Add `shift`, float64 (out,), to the bias of a Conv, as a new initializer, since the old one
    may be shared."""
    if len(product.inputs) <= BIAS:
        product.resize_inputs(BIAS + 1)
    bias = product.inputs[BIAS]
    if bias is not None:
        assert bias.const_value is not None
        shift = bias.const_value.numpy().astype(np.float64) + shift
    product.replace_input_with(BIAS, surgeon.number(f"{name}/bias", shift))


def take_padding(product: ir.Node) -> tuple[int, ...]:
    """Remove a Conv's padding from the graph that is lowered, and return it as Pad's (0, 0, top,
    left, 0, 0, bottom, right); () without padding, and for another operator."""
    before = product.attributes.get_ints("pads", ()) if product.op_type == OPERATOR else ()
    if not any(before):
        return ()
    half = len(before) // 2
    product.attributes["pads"] = ir.AttrInt64s("pads", [0] * len(before))
    return (0, 0, *before[:half], 0, 0, *before[half:])


def lower_summands(
    surgeon: Surgeon, names: GraphNames, ranges: Mapping[str, Range], *, signed: bool
) -> None:
    """Insert the quantizers of residual adds, pooling and float activations into the graph that is
    lowered.

    ranges: {module of names.summands: range}
    """
    quantized = {use.node for name in ranges for use in names.summands.get(name, ())}
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
        through = _centred if signed else partial(_unsigned, integers_before=quantized)
        handed_on = through(surgeon, first, name, value, covered)
        for reader, place in readers:
            reader.replace_input_with(place, handed_on)


def _reader(surgeon: Surgeon, name: str, use: OperatorInput) -> tuple[ir.Node, int]:
    """Find in the graph that is lowered the operator of `use`, and the index of its input that
    reads the tensor of `use`. Raises OptimizeError, which names `name`, unless exactly one reads
    it."""
    node = surgeon.nodes[use.node]
    places = [i for i, v in enumerate(node.inputs) if v is not None and v.name == use.input]
    if len(places) != 1:
        raise OptimizeError(
            f"{use.node} does not read {use.input} of {name} exactly once", where="lower"
        )
    return node, places[0]


def _unsigned(
    surgeon: Surgeon,
    add: ir.Node,
    name: str,
    value: ir.Value,
    covered: Range,
    *,
    integers_before: Collection[str],
) -> ir.Value:
    """Lower one operand of a residual add to uint8, sharing a convolution's integers of `value`;
    return the float value.

    integers_before: operators that read integers
    """
    maker = value.producer()
    shared = surgeon.inputs.get((value, covered.scale, covered.zero_point))
    slow = maker is not None and maker.op_type == SLOW_IN_INTEGERS
    if shared is not None and (not slow or (maker and maker.name in integers_before)):
        operands = list(shared.producer().inputs)
        return surgeon.insert(add, "DequantizeLinear", operands, f"{name}/input", name)
    scale = surgeon.number(f"{name}/input_scale", covered.scale)
    zero = surgeon.constant(f"{name}/input_zero_point", np.array(covered.zero_point, np.uint8))
    integers = surgeon.insert(
        add, "QuantizeLinear", [value, scale, zero], f"{name}/input_codes", name
    )
    return surgeon.insert(add, "DequantizeLinear", [integers, scale, zero], f"{name}/input", name)


def _centred(
    surgeon: Surgeon, add: ir.Node, name: str, value: ir.Value, covered: Range
) -> ir.Value:
    """Lower one operand of a residual add: quantize `value` minus the range's offset to int8;
    return the float value, offset added."""
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
    integers = surgeon.insert(
        add, "QuantizeLinear", [value, step], f"{name}/input_codes", name, output_dtype=kind
    )
    result = surgeon.insert(add, "DequantizeLinear", [integers, scale], f"{name}/input", name)
    if covered.offset:
        back = surgeon.number(f"{name}/offset_back", covered.offset)
        result = surgeon.insert(add, "Add", [result, back], f"{name}/moved_back", name)
    return result
