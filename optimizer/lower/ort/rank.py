"""Lift products of rank 2 to rank 3, with a batch of one.

ONNX Runtime turns MatMul + Add of rank 2 into Gemm, and Gemm with the activation behind it into
FusedGemm, before it looks for quantized products: both multiply dequantized floats (1.31, OPT's
fc1, whose inputs are flattened to (tokens, width)). Rank 3 never becomes a Gemm:

    x (tokens, K) -> Unsqueeze(0) -> MatMul -> Add -> Squeeze(0) -> (tokens, N)
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import ShapeInferencePass

from optimizer.export.names import GraphNames
from optimizer.export.scopes import MODULE, module_of
from optimizer.lower.onnx.examine import take_over
from optimizer.lower.onnx.qdq import Surgeon, find_quantized_modules


def lift(model: ir.Model, names: GraphNames, weights: Collection[str]) -> list[str]:
    """Rewrite for ONNX Runtime's fusions products of rank 2 by the parameters `weights` in place.
    Returns their modules."""
    inferred = model.clone()  # so that no inferred shape is written
    ShapeInferencePass()(inferred)
    ranks = {str(n.name): _rank(n.inputs[0]) for n in inferred.graph if n.op_type == "MatMul"}
    surgeon, lifted = Surgeon(model), []
    for name, module in find_quantized_modules(model, names, weights).items():
        for product in surgeon.products(module):
            x = product.inputs[0]
            if x is not None and ranks.get(str(product.name)) == 2:
                _lift(surgeon, name, product, x)
                lifted.append(name)
    return lifted


def _rank(value: ir.Value | None) -> int | None:
    return None if value is None or value.shape is None else len(value.shape)


def _lift(surgeon: Surgeon, name: str, product: ir.Node, x: ir.Value) -> None:
    """Give a product of the lowered graph three axes: insert Unsqueeze between `x` and `product`,
    and Squeeze behind it or behind its bias's Add."""
    first = surgeon.constant("first_axis", np.array([0], np.int64))
    key = (x, "rank 3")
    if key not in surgeon.inputs:
        label = surgeon.fresh(f"{name}/input_rank_3")
        surgeon.inputs[key] = surgeon.insert(product, "Unsqueeze", [x, first], label, name)
    product.replace_input_with(0, surgeon.inputs[key])
    last = product
    users = [n for n, _ in product.outputs[0].uses()]
    if len(users) == 1 and users[0].op_type == "Add" and module_of(users[0]) == name:
        last = users[0]
    result = last.outputs[0]
    label = surgeon.fresh(f"{name}/output_rank_2")
    squeezed = ir.node("Squeeze", [result, first], name=label, metadata_props={MODULE: name})
    surgeon.model.graph.insert_after(last, squeezed)
    take_over(result, squeezed.outputs[0])
    squeezed.replace_input_with(0, result)
    result.name = f"{name}/output_rank_3" + label.removeprefix(f"{name}/output_rank_2")
    for value in {product.outputs[0], result}:
        value.shape = None  # of rank 3 now
