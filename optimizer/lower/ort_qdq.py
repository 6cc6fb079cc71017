"""The dialect ONNX Runtime runs in integer kernels (measured on its CPU provider, 1.31).

 1. int8 weights, static activations
      x -> QuantizeLinear(uint8, zero point 128) -> DequantizeLinear -> MatMul(., DQ(int8 W))
    One Q is shared by every module that reads x at one scale. With int8 activations, or
    without the explicit zero point, a shared Q stays unfused; uint8 weights are slower.
 2. int8 weights, activations measured per token (per row of x, at run time)
      rows [M, K]: scale = max|row| / 127, codes = uint8(round(row / scale) + 128)
      MatMulInteger(codes, int8 W, 128) -> float, times row scale, times column scale
    Integer sums are exact, so this is compress.simulate's function up to float rounding.
 3. weight-only int8 and int4
      MatMul(x, DequantizeLinear(W)), which ONNX Runtime turns into MatMulNBits: int4 in blocks
      of a power of two from 16 to 256, int8 also per channel
Asymmetric weights (3) are unsigned with an unsigned zero point.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from optimizer.export.names import Module, Names
from optimizer.lower.qdq import Surgeon, dequantized_weight, quantized_modules, weight_parts
from optimizer.qtensor import QTensor
from optimizer.state import CompressedState

ZERO_POINT = 128
TINY = 2.0**-100  # keeps an all-zero row from dividing by zero; its codes are all 0


def lower(model: ir.Model, names: Names, state: CompressedState) -> dict[str, str]:
    """Lower `model` in place. Returns {module: how its input is coded}:
    "uint8" (case 1), "uint8 per token" (case 2) or "float" (case 3)."""
    surgeon = Surgeon(model)
    coded = {}
    for name, module in quantized_modules(names, state.weights).items():
        q = state.weights[module.parameter]
        if state.activations == "token":
            _per_token(surgeon, name, module, q)
            coded[name] = "uint8 per token"
        elif state.activations == "tensor":
            _static(surgeon, name, module, q, state.ranges[module.site].scale)
            coded[name] = "uint8"
        else:
            _weight_only(surgeon, name, module, q)
            coded[name] = "float"
    surgeon.drop_unused()
    return coded


def _static(surgeon: Surgeon, name: str, module: Module, q: QTensor, step: float) -> None:
    """Case 1."""
    weight = dequantized_weight(surgeon, name, module, q, np.float32, unsigned=False)
    for product in surgeon.products(module):
        x = product.inputs[0]
        assert x is not None
        key = (x, step)
        if key not in surgeon.inputs:
            label = surgeon.fresh(f"{name}/input")
            scale = surgeon.constant(f"{label}_scale", np.array(step, np.float32))
            zero = surgeon.constant("input_zero_point", np.array(ZERO_POINT, np.uint8))
            codes = surgeon.insert(
                product, "QuantizeLinear", [x, scale, zero], f"{label}_codes", name
            )
            surgeon.inputs[key] = surgeon.insert(
                product, "DequantizeLinear", [codes, scale, zero], label, name
            )
        product.replace_input_with(0, surgeon.inputs[key])
        product.replace_input_with(1, weight)


def _weight_only(surgeon: Surgeon, name: str, module: Module, q: QTensor) -> None:
    """Case 3."""
    weight = dequantized_weight(
        surgeon, name, module, q, np.float32, unsigned=q.zero_point is not None
    )
    for product in surgeon.products(module):
        product.replace_input_with(1, weight)


def _per_token(surgeon: Surgeon, name: str, module: Module, q: QTensor) -> None:
    """Case 2."""
    codes, scale, _, _ = weight_parts(surgeon, module.parameter, q, np.float32)
    zero = surgeon.constant("input_zero_point", np.array(ZERO_POINT, np.uint8))
    for product in surgeon.products(module):
        x = product.inputs[0]
        assert x is not None
        if (x, None) not in surgeon.inputs:
            surgeon.inputs[x, None] = _rows(surgeon, product, x, name, q.codes.shape[1])
        step = surgeon.row_steps[x]
        label = surgeon.fresh(f"{name}/product")
        given = [surgeon.inputs[x, None], codes, zero]
        whole = surgeon.insert(product, "MatMulInteger", [*given], f"{label}_codes", name)
        real = surgeon.insert(
            product, "Cast", [whole], f"{label}_float", name, to=int(ir.DataType.FLOAT)
        )
        rows = surgeon.insert(product, "Mul", [real, step], f"{label}_rows", name)
        columns = surgeon.insert(product, "Mul", [rows, scale], label, name)
        ir.convenience.replace_all_uses_with(product.outputs[0], columns)
        surgeon.model.graph.remove(product, safe=True)


def _rows(surgeon: Surgeon, before: ir.Node, x: ir.Value, module: str, width: int) -> ir.Value:
    """uint8 codes of x [.., K], each row by its own scale; the scale [.., 1] is kept for later.

    QuantizeLinear in blocks of K along the last axis takes one scale per row. Its zero point
    must have the scale's shape, which is known at run time only.
    """
    label = surgeon.fresh(f"{module}/input")
    last = surgeon.constant("last_axis", np.array([-1], np.int64))
    tiny = surgeon.constant("smallest_row", np.array(TINY, np.float32))
    high = surgeon.constant("highest_code", np.array(127, np.float32))

    def add(op: str, inputs: list[ir.Value | None], what: str, /, **attributes: object) -> ir.Value:
        return surgeon.insert(before, op, inputs, f"{label}_{what}", module, **attributes)

    size = add("Abs", [x], "size")
    largest = add("ReduceMax", [size, last], "largest", keepdims=1)
    safe = add("Max", [largest, tiny], "safe")
    step = surgeon.row_steps[x] = add("Div", [safe, high], "scale")
    shape = add("Shape", [step], "scale_shape")
    fill = ir.tensor(np.array([ZERO_POINT], np.uint8))
    zero = add("ConstantOfShape", [shape], "zero_point", value=fill)
    return add("QuantizeLinear", [x, step, zero], "codes", axis=-1, block_size=width)
