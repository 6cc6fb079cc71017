"""Facts about an ONNX graph in the form of an architecture's, with the graph's parts as blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optimizer.harness.inputs.tensors import TENSORS
from optimizer.model.architectures.family_record import Family
from optimizer.model.architectures.linear_blocks import SmoothPair
from optimizer.model.architectures.residual_blocks import Summand
from optimizer.model.graph.record import MODEL_TYPE, PARTS


def of_config(config: Mapping[str, Any]) -> Family:
    """Build the facts of a graph from config.json as load writes it (load/onnx_model/stage.py:
    config)."""
    return Family(
        model_type=MODEL_TYPE,
        base="",
        blocks="{" + PARTS + "}",  # in braces: their inputs differ in shape
        embeddings="",
        linears=tuple(config["modules"]),
        smooth=tuple(SmoothPair(path, tuple(readers)) for path, readers in config["norms"]),
        equalized=tuple(SmoothPair(path, tuple(readers)) for path, readers in config["equalized"]),
        inputs=TENSORS.name,
        left_float=tuple(config["left"].items()),
        summands=tuple(Summand(name, module, whole=True) for name, module in config["marks"]),
    )
