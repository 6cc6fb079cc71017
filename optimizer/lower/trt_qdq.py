"""The dialect TensorRT-RTX parses: int8 and int4 with a scale only, no zero point anywhere.

    weights       as qdq.py lays them out; scales in the graph's float type
    activations   QuantizeLinear -> DequantizeLinear, int8, one scale per tensor, in front of
                  every quantized module; modules that read one tensor at one scale share it

The same scales as ort_qdq's, so both files compute the same function.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from optimizer.export.names import Names
from optimizer.lower.qdq import Surgeon, dequantized_weight, quantized_modules
from optimizer.state import CompressedState


def lower(model: ir.Model, names: Names, state: CompressedState, float_type: str) -> dict[str, str]:
    """Lower `model` in place. Returns {module: how its input is coded: "int8" | "float"}."""
    scale_type = {"fp32": np.float32, "fp16": np.float16}[float_type]
    surgeon = Surgeon(model)
    inputs = {}
    for name, module in quantized_modules(names, state.weights).items():
        weight = dequantized_weight(
            surgeon, name, module, state.weights[module.parameter], scale_type, unsigned=False
        )
        for product in surgeon.products(module):
            if state.activations == "tensor":
                step = state.ranges[module.site].scale
                product.replace_input_with(
                    0, quantized_input(surgeon, product, name, step, scale_type)
                )
            product.replace_input_with(1, weight)
        inputs[name] = "int8" if state.activations == "tensor" else "float"
    surgeon.drop_unused()
    return inputs


def quantized_input(
    surgeon: Surgeon, product: ir.Node, module: str, step: float, scale_type: type
) -> ir.Value:
    """product's first operand through Q and DQ; made once per tensor and scale."""
    x = product.inputs[0]
    assert x is not None
    if (x, step) not in surgeon.inputs:
        label = surgeon.fresh(f"{module}/input")
        scale = surgeon.constant(f"{label}_scale", np.array(step, scale_type))
        codes = surgeon.insert(
            product,
            "QuantizeLinear",
            [x, scale],
            f"{label}_codes",
            module,
            output_dtype=int(ir.DataType.INT8),
        )
        surgeon.inputs[x, step] = surgeon.insert(
            product, "DequantizeLinear", [codes, scale], label, module
        )
    return surgeon.inputs[x, step]
