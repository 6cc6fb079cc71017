"""Lower to the dialect of TensorRT and TensorRT-RTX: int8 and int4 with a scale, no zero point.

    weights       see lower/onnx/qdq.py; scales in the graph's float type. A layer that the graph
                  uses n times has n copies of them.
    activations   x factor - offset -> QuantizeLinear -> DequantizeLinear, int8, one scale per
                  tensor; modules that read one tensor in one range share it
    convolutions  padded before quantization, see lower/onnx/convolution.py
    embeddings    see lower/onnx/lookup.py, where the runtime looks up rows of int8
                  (targets/__init__.py)

A range whose zero point is not 128 is centred by its offset (state.Range), and W offset is added
to the bias: W x + b = W (x - offset) + (W offset + b). The integers are those of ort_qdq, so both
files compute the same function, up to rounding in the graph's float type.

Operators before QuantizeLinear compute in float32: after GELU the offset is a hundred times a usual
x, so that x - offset in float16 would keep three bits of x and change one integer in ten.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from torch import Tensor

from optimizer.export.check import FLOAT_TYPES
from optimizer.export.names import GraphNames
from optimizer.foundation.qtensor import QTensor
from optimizer.foundation.state import CompressedState, Range
from optimizer.lower.onnx import convolution, lookup
from optimizer.lower.onnx.qdq import (
    Surgeon,
    apply_factor,
    dequantize_weight,
    find_quantized_modules,
)


def lower(
    model: ir.Model, names: GraphNames, state: CompressedState, float_type: str
) -> dict[str, str]:
    """Lower `model` in place for TensorRT. Returns {module: activation: "int8", "float", or "ids"
    (embedding)}.

    float_type: "fp32" | "fp16", the float type of the graph
    """
    surgeon = Surgeon(model, FLOAT_TYPES[float_type], state.weights)
    activations = lookup.lower(surgeon, names, state)
    multiplied = set(state.weights) - {names.lookups[name].parameter for name in activations}
    for name, module in find_quantized_modules(model, names, multiplied).items():
        q, factor = state.weights[module.parameter], state.factors.get(module.site)
        static = state.activations_of(name) == "tensor"
        for copy, product in enumerate(surgeon.products(module)):
            # ONNX Runtime reads this file too, and refuses one weight in two operators where it
            # moves weights to uint8 (harness/runtimes/ort/exact_integers.py).
            weight = dequantize_weight(surgeon, product, name, module.parameter, q, copy=copy)
            if static:
                covered = state.ranges[module.site]
                x = _quantized_input(surgeon, product, name, factor, covered)
                _shift_bias(surgeon, product, name, q, covered.offset)
            else:
                x = apply_factor(surgeon, product, name, factor)
            product.replace_input_with(0, x)
            product.replace_input_with(1, weight)
        activations[name] = "int8" if static else "float"
    convolution.lower_summands(surgeon, names, state.summands, signed=True)
    surgeon.finish()
    return activations


def _quantized_input(
    surgeon: Surgeon, product: ir.Node, name: str, factor: Tensor | None, covered: Range
) -> ir.Value:
    """Quantize for TensorRT the product's first operand times its factor, centred and padded;
    shared for one tensor, factor, range and padding."""
    x = product.inputs[0]
    assert x is not None
    factors = None if factor is None else factor.numpy()
    sides = convolution.take_padding(product) if covered.offset else ()
    seen = None if factors is None else factors.tobytes()
    key = (x, covered.scale, covered.zero_point, seen, sides)
    if key in surgeon.inputs:
        shared: ir.Value = surgeon.inputs[key]
        return shared
    label = surgeon.fresh(f"{name}/input")
    moved = factors is not None or covered.offset != 0
    wide = moved and surgeon.float_type != "float32"

    def single(what: str, value: object) -> ir.Value:
        return surgeon.constant(f"{label}_{what}", np.asarray(value, np.float32))

    if wide:
        to = int(ir.DataType.FLOAT)
        x = surgeon.insert(product, "Cast", [x], f"{label}_float32", name, to=to)
    if factors is not None:
        x = surgeon.insert(product, "Mul", [x, single("factor", factors)], f"{label}_scaled", name)
    if covered.offset:
        offset = single("offset", covered.offset)
        x = surgeon.insert(product, "Sub", [x, offset], f"{label}_centred", name)
    if sides:
        pads = surgeon.constant(f"{label}_sides", np.array(sides, np.int64))
        zero = single("zero", -covered.offset)
        x = surgeon.insert(product, "Pad", [x, pads, zero], f"{label}_padded", name)
    scale = surgeon.number(f"{label}_scale", covered.scale)
    step = single("step", covered.scale) if wide else scale
    kind = int(ir.DataType.INT8)
    integers = surgeon.insert(
        product, "QuantizeLinear", [x, step], f"{label}_codes", name, output_dtype=kind
    )
    dequantized = surgeon.insert(product, "DequantizeLinear", [integers, scale], label, name)
    surgeon.inputs[key] = dequantized
    return dequantized


def _shift_bias(surgeon: Surgeon, product: ir.Node, name: str, q: QTensor, offset: float) -> None:
    """Add W offset to the bias of a module that is lowered for TensorRT and whose input range is
    centred. The new bias is an initializer of its own, because modules may share one."""
    if not offset:
        return
    shift = offset * q.dequantize().double().sum(1).numpy()
    if product.op_type == convolution.OPERATOR:
        convolution.shift_bias(surgeon, product, name, shift)
        return
    users = [node for node, _ in product.outputs[0].uses()]
    biased = len(users) == 1 and users[0].op_type == "Add"
    operand = _other(users[0], product.outputs[0]) if biased else None
    if (
        operand is not None
        and operand.const_value is not None
        and operand.const_value.size == len(shift)
    ):
        bias = operand.const_value.numpy().astype(np.float64).reshape(-1) + shift
        place = next(i for i, v in enumerate(users[0].inputs) if v is operand)
        users[0].replace_input_with(place, surgeon.number(f"{name}/bias", bias))
        return
    label = surgeon.fresh(f"{name}/shifted")
    constant = surgeon.number(f"{name}/bias", shift)
    added = ir.node(
        "Add", [product.outputs[0], constant], name=label, metadata_props={"module": name}
    )
    added.outputs[0].name = label
    ir.convenience.replace_all_uses_with(product.outputs[0], added.outputs[0])
    added.replace_input_with(0, product.outputs[0])
    surgeon.model.graph.insert_after(product, added)


def _other(node: ir.Node, value: ir.Value) -> ir.Value | None:
    return next((v for v in node.inputs if v is not value), None)
