"""Facts about an ONNX graph, as of an architecture: its parts are the blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optimizer.harness.inputs.tensors import TENSORS
from optimizer.model.architectures.family_record import Family
from optimizer.model.architectures.residual_blocks import Summand
from optimizer.model.graph.record import MODEL_TYPE, PARTS


def of_config(config: Mapping[str, Any]) -> Family:
    """The facts that load wrote to config.json (load/onnx_model/stage.py: config)."""
    return Family(
        model_type=MODEL_TYPE,
        base="",
        blocks="{" + PARTS + "}",  # in braces: their inputs differ in shape
        embeddings="",
        linears=tuple(config["modules"]),
        smooth=(),
        inputs=TENSORS.name,
        left_float=tuple(config["left"].items()),
        summands=tuple(Summand(name, module, whole=True) for name, module in config["marks"]),
    )
