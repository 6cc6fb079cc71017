"""Fuse swish of quantized images, x * sigmoid(x), to ONNX Runtime's QuickGelu with a slope of 1.

ONNX Runtime itself does so for a float x; behind a DequantizeLinear it first duplicates that for
both operators, and then finds no single x.
"""

from __future__ import annotations

import onnx_ir as ir

from optimizer.export.scopes import MODULE, module_of
from optimizer.lower.onnx.examine import find_maker, find_only_user, take_over

DOMAIN = "com.microsoft"
OPERATOR = "QuickGelu"


def fuse(model: ir.Model) -> tuple[str, ...]:
    """Fuse swish of quantized values, x * sigmoid(x), for ONNX Runtime, in place. Returns the
    modules of the activations."""
    done = []
    for sigmoid in [n for n in model.graph if n.op_type == "Sigmoid"]:
        x, product = sigmoid.inputs[0], find_only_user(sigmoid.outputs[0])
        if find_maker(x, "DequantizeLinear") is None or product is None or product.op_type != "Mul":
            continue
        if {*product.inputs} != {x, sigmoid.outputs[0]} or sigmoid.outputs[0].is_graph_output():
            continue
        module = module_of(product)
        node = ir.node(
            OPERATOR,
            [x],
            {"alpha": 1.0},
            domain=DOMAIN,
            name=f"{module or product.name}/{OPERATOR}",
            metadata_props={MODULE: module},
        )
        model.graph.insert_before(product, node)
        take_over(product.outputs[0], node.outputs[0])
        model.graph.remove([product, sigmoid], safe=True)
        done.append(module)
    if done:
        model.opset_imports[DOMAIN] = 1
    return tuple(done)
