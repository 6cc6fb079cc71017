"""Let a run of a decoder compute the logits of its last tokens only.

    logits = head(hidden[:, start:])        start 0: of all tokens; -1: of the last of each row

The head multiplies by the vocabulary, so for a prompt of many tokens it is a large part of the
work, and of the copy from a GPU, although generation reads the last token's logits only. `start` is
an initializer that a run may override (harness/runtimes/ort/decoder.py). Perplexity, guesses and
every reader that does not know it get the logits of all tokens.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from optimizer.export.scopes import MODULE
from optimizer.harness.runtimes.ort.decoder import FIRST_SCORED, LOGITS
from optimizer.lower.onnx.examine import add_initializer

PRODUCTS = ("MatMul", "MatMulNBits", "Gemm")
ELEMENTWISE = ("Cast", "Mul", "Div", "Tanh")  # a head's own, such as capped logits
TOKENS = 1  # axis of hidden states [batch, tokens, features]


def add(model: ir.Model) -> str:
    """Add the initializer `start` to a decoder's graph that is lowered, in place, 0 by default.
    Returns the reason where its head is not found, else ""."""
    graph = model.graph
    logits = next(v for v in graph.outputs if v.name == LOGITS)
    head = _head(logits)
    hidden = None if head is None else head.inputs[0]
    if head is None or hidden is None:
        return "its logits are not a product followed by elementwise operators"
    start = add_initializer(graph, FIRST_SCORED, np.array([0], np.int64))
    graph.inputs.append(start)
    end = add_initializer(graph, f"{FIRST_SCORED}/end", np.array([2**62], np.int64))
    axis = add_initializer(graph, f"{FIRST_SCORED}/axis", np.array([TOKENS], np.int64))
    kept = ir.node(
        "Slice",
        [hidden, start, end, axis],
        name=f"{FIRST_SCORED}/Slice",
        metadata_props={MODULE: ""},
    )
    kept.outputs[0].name, kept.outputs[0].type = f"{FIRST_SCORED}/hidden", hidden.type
    graph.insert_before(head, kept)
    head.replace_input_with(0, kept.outputs[0])
    if logits.shape is not None:
        logits.shape = ir.Shape([logits.shape[0], "scored", logits.shape[2]])
    model.metadata_props[FIRST_SCORED] = "overridable"
    return ""


def _head(logits: ir.Value) -> ir.Node | None:
    """Return the product that makes a decoder's logits, if they are the output of one; else
    None."""
    node = logits.producer()
    while node is not None and node.op_type in ELEMENTWISE:
        node = next((v.producer() for v in node.inputs if v is not None and v.producer()), None)
    return node if node is not None and node.op_type in PRODUCTS else None
