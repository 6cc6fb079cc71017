"""Lower to the dialect that ONNX Runtime runs in integer kernels (CPU provider, 1.31).

 1. int8 weights, static activations
      x -> QuantizeLinear(uint8, the range's zero point) -> DequantizeLinear -> MatMul(., DQ(W))
    Modules that read x in one range share a Q. With int8 activations, or without the explicit
    zero point, a shared Q stays unfused; uint8 weights are slower.
 2. int8 weights, activations measured per token (per row of x, at run time)
      scale = max|row| / 127      integers = uint8(round(row / scale) + 128)
      MatMulInteger(integers, int8 W, 128) -> float, times row scale, times column scale
    Integer sums are exact, so this is the state's function up to float rounding.
    In 1 and 2 a layer that is used n times reads n values of its integers, all but the first behind
    a Reshape to the same shape: where ONNX Runtime moves weights to uint8 (exact_integers.py), it
    names the moved ones after the value and refuses a name that occurs twice. It folds the Reshape
    first, into a value of another name.
 3. weight-only int8 and int4
      MatMul(x, DequantizeLinear(W)), which ONNX Runtime turns into MatMulNBits: int4 in blocks
      of a power of two from 16 to 256, int8 also per channel. It leaves a product in float where
      another operator reads its integers or scales too (its pull request 28326), so a layer that
      is used n times has n copies of them.
A convolution is case 1, with its bias in integers (lower/onnx/convolution.py). For embeddings see
lower/onnx/lookup.py. Where the state has a factor for a site, x is multiplied by it first.
Asymmetric weights (3) are unsigned with an unsigned zero point. Products of rank 2 in 1 and 3 are
lifted to rank 3 first (rank.py).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from optimizer.export.check import FLOAT_TYPES
from optimizer.export.names import GraphNames, ModuleInGraph
from optimizer.foundation.qtensor import QTensor
from optimizer.foundation.state import CompressedState, Range
from optimizer.lower.onnx import attention_operands, convolution, lookup
from optimizer.lower.onnx.qdq import (
    Surgeon,
    add_weight,
    apply_factor,
    dequantize_weight,
    find_quantized_modules,
)
from optimizer.lower.ort import rank
from optimizer.model.architectures.operands import select_operands

ROW_ZERO_POINT = 128
TINY = 2.0**-100  # avoids division by zero for an all-zero row; its integers are all 0

Products = list[tuple[ir.Node, ir.Value]]  # operators, each with its new input


def lower(
    model: ir.Model, names: GraphNames, state: CompressedState, float_type: str = "fp32"
) -> dict[str, str]:
    """Lower `model` in place for ONNX Runtime. Returns {module: activation}: "uint8" (case 1),
    "uint8 per token" (case 2), "float" (case 3) or "ids" (embedding).

    float_type: "fp32" | "fp16", the float type of the graph; fp16 has only case 3 and embeddings
    """
    of = names.parameter_of
    rank.lift(
        model,
        names,
        {
            of[n]
            for n in names.modules
            if of[n] in state.weights and state.activations_of(n) != "token"
        },
    )
    surgeon = Surgeon(model, FLOAT_TYPES[float_type], state.weights)
    activations = lookup.lower(surgeon, names, state)
    multiplied = set(state.weights) - {names.lookups[name].parameter for name in activations}
    for name, module in find_quantized_modules(model, names, multiplied).items():
        q, factor = state.weights[module.parameter], state.factors.get(module.site)
        products = [(p, apply_factor(surgeon, p, name, factor)) for p in surgeon.products(module)]
        mode = state.activations_of(name)
        if mode == "token":
            activations[name] = _per_token(surgeon, name, module, q, products)
        elif mode == "tensor":
            covered = state.ranges[module.site]
            activations[name] = _static(surgeon, name, module, q, products, covered)
        else:
            activations[name] = _weight_only(surgeon, name, module, q, products)
    operands = select_operands(state)
    added = {name: r for name, r in state.summands.items() if name not in operands}
    convolution.lower_summands(surgeon, names, added, signed=False)
    attention_operands.lower(surgeon, names, operands)
    surgeon.finish()
    return activations


def _static(
    surgeon: Surgeon,
    name: str,
    module: ModuleInGraph,
    q: QTensor,
    products: Products,
    covered: Range,
) -> str:
    """Lower a module with a static activation range (case 1); return its `activation` for
    lowering.json."""
    for copy, (product, x) in enumerate(products):
        convolves = product.op_type == convolution.OPERATOR  # else it becomes one integer product
        weight = dequantize_weight(
            surgeon, product, name, module.parameter, q, zero_points=convolves
        )
        dequantizes = weight.producer()
        if copy and dequantizes is not None and dequantizes.inputs[0] is not None:
            again = _again(surgeon, dequantizes, name, dequantizes.inputs[0], copy)
            dequantizes.replace_input_with(0, again)
        key = (x, covered.scale, covered.zero_point)
        if key not in surgeon.inputs:
            label = surgeon.fresh(f"{name}/input")
            scale = surgeon.number(f"{label}_scale", covered.scale)
            zero = surgeon.constant(f"{label}_zero_point", np.array(covered.zero_point, np.uint8))
            integers = surgeon.insert(
                product, "QuantizeLinear", [x, scale, zero], f"{label}_codes", name
            )
            surgeon.inputs[key] = surgeon.insert(
                product, "DequantizeLinear", [integers, scale, zero], label, name
            )
        product.replace_input_with(0, surgeon.inputs[key])
        product.replace_input_with(1, weight)
        if product.op_type == convolution.OPERATOR:
            convolution.add_integer_bias(surgeon, product, name, q, covered)
    return "uint8"


def _weight_only(
    surgeon: Surgeon, name: str, module: ModuleInGraph, q: QTensor, products: Products
) -> str:
    """Lower a module of which only the weight is quantized (case 3); return its `activation` for
    lowering.json."""
    unsigned = q.zero_point is not None
    for copy, (product, x) in enumerate(products):
        weight = dequantize_weight(surgeon, product, name, module.parameter, q, unsigned, copy)
        product.replace_input_with(0, x)
        product.replace_input_with(1, weight)
    return "float"


def _per_token(
    surgeon: Surgeon, name: str, module: ModuleInGraph, q: QTensor, products: Products
) -> str:
    """Lower a module whose activations get a scale per token at run time (case 2); return its
    `activation` for lowering.json."""
    integers, scale, _, _ = add_weight(surgeon, module.parameter, q)
    zero = surgeon.constant("row_zero_point", np.array(ROW_ZERO_POINT, np.uint8))
    for copy, (product, x) in enumerate(products):
        key = (x, "per row")
        if key not in surgeon.inputs:
            surgeon.inputs[key] = _rows(surgeon, product, x, name, q.integers.shape[1])
        rows, step = surgeon.inputs[key]
        label = surgeon.fresh(f"{name}/product")
        weight = _again(surgeon, product, name, integers, copy) if copy else integers
        total = surgeon.insert(
            product, "MatMulInteger", [rows, weight, zero], f"{label}_codes", name
        )
        real = surgeon.insert(
            product, "Cast", [total], f"{label}_float", name, to=int(ir.DataType.FLOAT)
        )
        by_row = surgeon.insert(product, "Mul", [real, step], f"{label}_rows", name)
        by_column = surgeon.insert(product, "Mul", [by_row, scale], label, name)
        ir.convenience.replace_all_uses_with(product.outputs[0], by_column)
        surgeon.model.graph.remove(product, safe=True)
    return "uint8 per token"


def _again(surgeon: Surgeon, before: ir.Node, module: str, old: ir.Value, copy: int) -> ir.Value:
    """Insert a Reshape of `old`, a lowered weight's integers, to its own shape; return the value,
    of another name."""
    assert old.shape is not None
    shape = surgeon.constant(f"{old.name}_shape", np.array(old.shape.numpy(), np.int64))
    value = surgeon.insert(before, "Reshape", [old, shape], f"{old.name}_{copy}", module)
    value.shape, value.dtype = old.shape, old.dtype
    return value


def _rows(
    surgeon: Surgeon, before: ir.Node, x: ir.Value, module: str, width: int
) -> tuple[ir.Value, ir.Value]:
    """Insert into the lowered graph the quantization of each row of x [.., K] to uint8. Returns the
    integers and the scales [.., 1].

    QuantizeLinear in blocks of K along the last axis takes one scale per row, and a zero point in
    the scale's shape, known at run time only.
    """
    label = surgeon.fresh(f"{module}/input")
    last = surgeon.constant("last_axis", np.array([-1], np.int64))
    tiny = surgeon.number("smallest_row", TINY)
    high = surgeon.number("highest_code", 127)

    def add(op: str, inputs: list[ir.Value | None], what: str, /, **attributes: object) -> ir.Value:
        return surgeon.insert(before, op, inputs, f"{label}_{what}", module, **attributes)

    size = add("Abs", [x], "size")
    largest = add("ReduceMax", [size, last], "largest", keepdims=1)
    safe = add("Max", [largest, tiny], "safe")
    step = add("Div", [safe, high], "scale")
    shape = add("Shape", [step], "scale_shape")
    fill = ir.tensor(np.array([ROW_ZERO_POINT], np.uint8))
    zero = add("ConstantOfShape", [shape], "zero_point", value=fill)
    return add("QuantizeLinear", [x, step, zero], "codes", axis=-1, block_size=width), step
