"""Small graphs from ONNX's text format, and their answers by ONNX's reference."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator


def graph(text: str, **held: np.ndarray) -> ir.Model:
    """A model from ONNX's text format, with initializers."""
    model = ir.from_onnx_text(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')
    for name, array in held.items():
        tensor = ir.tensor(array, name=name)
        value = ir.val(name, tensor.dtype, tensor.shape, const_value=tensor)
        found = next(v for n in model.graph for v in n.inputs if v is not None and v.name == name)
        ir.convenience.replace_all_uses_with(found, value)
        model.graph.register_initializer(value)
    return model


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def answer(model: ir.Model, **inputs: np.ndarray) -> np.ndarray:
    proto = ir.to_proto(model)
    onnx.checker.check_model(proto)
    return np.asarray(ReferenceEvaluator(proto).run(None, inputs)[0])
