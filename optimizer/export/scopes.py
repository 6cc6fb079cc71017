"""Read which module of the checkpoint an operator of the graph came from."""

from __future__ import annotations

import ast

import onnx_ir as ir

WRAPPED = "model"
"""Attribute that holds the model while it is traced; the passes strip it from names."""

SCOPES = "pkg.torch.onnx.name_scopes"
MODULE = "module"


def module_of(node: ir.Node) -> str:
    """Return the checkpoint's name of the module that a node of the exported graph came from; ""
    for the model itself.

    Read from the exporter's scopes (a list from the root to the operator) or, once named, from
    the node's own metadata.
    """
    if MODULE in node.metadata_props:
        return str(node.metadata_props[MODULE])
    scopes = ast.literal_eval(node.metadata_props.get(SCOPES, "['']"))
    path = str(scopes[-2]) if len(scopes) > 1 else ""
    inside = path == WRAPPED or path.startswith(f"{WRAPPED}.")
    return path.removeprefix(WRAPPED).removeprefix(".") if inside else ""
