"""What the parser and the builder say, in the words of the checkpoint, and what to do about it.

The lowering names every node `<module>/<operator>`, so a node's name says its module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ....errors import BuildError, HarnessError
from .watch import Messages

# What is said -> what to do about it. Found by provoking each with TensorRT-RTX 1.7.
ADVICE = (
    (
        "Non-zero zero point",
        "It takes symmetric quantization only: lower with the trt_qdq dialect, symmetric: true.",
    ),
    (
        "Failed to import initializer",  # of a type it does not have: uint4
        "It takes int8 and int4 codes, no unsigned ones: lower with the trt_qdq dialect.",
    ),
    (
        "divide into whole blocks",
        "Use a group_size that divides the module's inputs: 32, 64 or 128.",
    ),
    ("has type Int32 but must have type", "It takes no int32 codes: leave the bias in float."),
    (
        "Plugin not found",
        "No such operator here: leave the module out of the graph, or use target onnxruntime.",
    ),
    (
        "input tensor A must be FP16",
        "MatMulNBits runs in fp16 only: use float: fp16, or DequantizeLinear + MatMul.",
    ),
    ("FP32 GEMM is not supported", "SM75 runs fp16 only: use float: fp16, or drop 75."),
    ("MIN<=OPT<=MAX", "Each of shapes must be [min, opt, max], ascending."),
    (
        "violate shape constraints",
        "The model cannot run at the middle shape: change shapes to what the model takes.",
    ),
    (
        "not self-consistent",
        "The model cannot run at the largest shape: lower the maximum of shapes.sequence to "
        "what the model's positions allow.",
    ),
)
UNSUPPORTED = "This target does not run that operator: use target onnxruntime for this model."


def subject(node: str, operator: str) -> str:
    """ "module encoder.dense: its MatMul (encoder.dense/MatMul)"; a node of another name is only
    a node."""
    if not node:
        return operator or "the graph"
    module = node.rpartition("/")[0]
    return f"module {module}: its {operator} ({node})" if module else f"node {node} ({operator})"


def parse_error(parser: Any, onnx: Path, messages: Messages) -> HarnessError:
    """The parser's first complaint, naming the module and what to do."""
    if not parser.num_errors:
        return BuildError(f"the parser refused it ({errors(messages)})", where=str(onnx))
    e = parser.get_error(0)
    description = e.desc().strip()
    useful = [
        line for line in description.splitlines() if "Cuda" not in line
    ]  # there is no GPU: noise
    known = advice([("error", description)]) or (
        UNSUPPORTED if "UNSUPPORTED" in str(e.code()) else ""
    )
    reason = "" if description == "false" else f" ({' '.join(useful)[:300]})"
    return BuildError(
        f"{subject(e.node_name(), e.node_operator())} is not supported{reason}",
        where=str(onnx),
        fix=known,
    )


def plan_error(messages: Messages, onnx: Path) -> HarnessError:
    """Why the builder made no engine, or one that must not be used."""
    inconsistent = [m for _, m in messages if "not self-consistent" in m]
    message = inconsistent[0] if inconsistent else errors(messages)
    return BuildError(
        f"the builder refused it ({message[:400]})",
        where=str(onnx),
        fix=advice([("error", message)]),
    )


def errors(messages: Messages) -> str:
    """The errors in one line, less what only says that there is no GPU."""
    kept = [m for kind, m in messages if kind == "error" and "Cuda Runtime" not in m]
    return " ".join(kept) or "no reason was given"


def advice(messages: Messages) -> str:
    """What to do about what was said; "" when nobody knows."""
    text = " ".join(m for _, m in messages)
    return next((what for sign, what in ADVICE if sign in text), "")
