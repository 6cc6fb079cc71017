"""Explain errors of TensorRT's parser and builder: name the module and what to do.

Lowering names every node `<module>/<operator>`, so that a node's name contains its module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ....errors import BuildError, HarnessError
from .watch import Messages

# text of a message -> advice; each was provoked with TensorRT-RTX 1.7
ADVICE = (
    (
        "Non-zero zero point",
        "It takes symmetric quantization only: lower with the trt_qdq dialect, symmetric: true.",
    ),
    (
        "Failed to import initializer",  # of an unsupported type: uint4
        "It takes signed int8 and int4 weights only: lower with the trt_qdq dialect.",
    ),
    (
        "divide into whole blocks",
        "Use a group_size that divides the module's inputs: 32, 64 or 128.",
    ),
    ("has type Int32 but must have type", "It takes no int32 biases: leave the bias in float."),
    (
        "Plugin not found",
        "The operator is not supported: leave the module out, or use target onnxruntime.",
    ),
    (
        "input tensor A must be FP16",
        "MatMulNBits runs in fp16 only: use float: fp16, or DequantizeLinear + MatMul.",
    ),
    ("FP32 GEMM is not supported", "SM75 runs fp16 only: use float: fp16, or drop 75."),
    ("MIN<=OPT<=MAX", "Each entry of shapes must be [min, opt, max] in ascending order."),
    (
        "violate shape constraints",
        "The model cannot run at the opt shape: set shapes to values that the model takes.",
    ),
    (
        "not self-consistent",
        "The model cannot run at the largest shape: lower the maximum of shapes.sequence to "
        "what the model's positions allow.",
    ),
)
UNSUPPORTED = "This target does not support the operator: use target onnxruntime for this model."


def describe_node(node: str, operator: str) -> str:
    """Describe for TensorRT's errors a node: "module encoder.dense: its MatMul
    (encoder.dense/MatMul)".

    A node named otherwise has no module.
    """
    if not node:
        return operator or "the graph"
    module = node.rpartition("/")[0]
    return f"module {module}: its {operator} ({node})" if module else f"node {node} ({operator})"


def parse_error(parser: Any, onnx: Path, messages: Messages) -> HarnessError:
    """Build the error for an ONNX file that TensorRT's parser refuses: its first message, with the
    module and advice."""
    if not parser.num_errors:
        return BuildError(
            f"the parser rejected the model ({join_errors(messages)})", where=str(onnx)
        )
    e = parser.get_error(0)
    description = e.desc().strip()
    useful = [line for line in description.splitlines() if "Cuda" not in line]  # no GPU here
    fix = advise([("error", description)]) or (
        UNSUPPORTED if "UNSUPPORTED" in str(e.code()) else ""
    )
    reason = "" if description == "false" else f" ({' '.join(useful)[:300]})"
    return BuildError(
        f"{describe_node(e.node_name(), e.node_operator())} is not supported{reason}",
        where=str(onnx),
        fix=fix,
    )


def plan_error(messages: Messages, onnx: Path) -> HarnessError:
    """Build the error for TensorRT's builder having made no engine, or an unusable one."""
    inconsistent = [m for _, m in messages if "not self-consistent" in m]
    message = inconsistent[0] if inconsistent else join_errors(messages)
    return BuildError(
        f"the builder rejected the model ({message[:400]})",
        where=str(onnx),
        fix=advise([("error", message)]),
    )


def join_errors(messages: Messages) -> str:
    """Join TensorRT's error messages in one line, without those about the missing GPU."""
    lines = [m for kind, m in messages if kind == "error" and "Cuda Runtime" not in m]
    return " ".join(lines) or "no reason was given"


def advise(messages: Messages) -> str:
    """Return advice on what to do for known messages of TensorRT, or ""."""
    text = " ".join(m for _, m in messages)
    return next((fix for sign, fix in ADVICE if sign in text), "")
