"""Fold constants and remove dead nodes; parameters are graph inputs meanwhile."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir
from torch import Tensor

from optimizer.export.onnx_from_torch import without_exporter_warnings
from optimizer.export.scopes import SCOPES
from optimizer.export.weights import hide


def fold(model: ir.Model, values: Mapping[str, Tensor]) -> None:
    """Fold constant expressions of an exported graph, in place; the parameters in `values` are not
    folded.

    values: {parameter: its value}, read when the graph is written
    """
    import onnxscript.optimizer

    with hide(model, values):
        with without_exporter_warnings():
            onnxscript.optimizer.optimize_ir(model)
        for node in model.graph:  # a fused node has no scope: it gets that of its first user
            users = [user for value in node.outputs for user, _ in value.uses()]
            if SCOPES not in node.metadata_props and users:
                node.metadata_props[SCOPES] = users[0].metadata_props.get(SCOPES, "['']")


def has_scopes(model: ir.Model) -> bool:
    """Test that every node of the exported graph with a used output carries the exporter's scopes
    in its metadata."""
    read = (n for n in model.graph if any(v.uses() for v in n.outputs))
    return all(SCOPES in node.metadata_props for node in read)
