"""Turn the exporter's graph into one that is short, stable and named as the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import Tensor

from optimizer.export.passes import Pass, run
from optimizer.export.passes.cache_length import read_first_cache, reads_first_cache
from optimizer.export.passes.fold_constants import fold, has_scopes
from optimizer.export.passes.mask import simplify_mask
from optimizer.export.passes.mean_square import divide_by_root, divides_by_root
from optimizer.export.passes.node_names import is_alive, is_named, name_nodes
from optimizer.export.passes.parameter_names import find_parameter_names, is_renamed, rename
from optimizer.export.passes.shapes import simplify_shapes
from optimizer.export.passes.transpose_weights import is_transposed, transpose_weights


def clean(model: ir.Model, values: Mapping[str, Tensor], first: Mapping[str, str]) -> ir.Model:
    """Run every export pass on `model`, in place, and return it.

    values: every parameter's value, read when the graph is written
    first: {parameter: first of its names}, the name that the initializer of tied ones gets
    """
    names = find_parameter_names(model, first)
    named = partial(is_renamed, names=names)
    steps = (
        Pass("parameter_names", partial(rename, names=names), ensures=named),
        Pass("fold_constants", partial(fold, values=values), named, has_scopes),
        Pass("transpose_weights", transpose_weights, has_scopes, is_transposed),
        Pass("cache_length", read_first_cache, ensures=reads_first_cache),
        Pass("shapes", simplify_shapes, has_scopes),
        Pass("mean_square", divide_by_root, has_scopes, divides_by_root),
        Pass("mask", simplify_mask, has_scopes),
        Pass("dead_nodes", remove_dead, ensures=is_alive),
        Pass("node_names", partial(name_nodes, parameters=set(names.values())), is_alive, is_named),
    )
    run(model, steps)
    return model


def remove_dead(model: ir.Model) -> None:
    """Remove nodes and initializers of the exported graph that reach no output."""
    RemoveUnusedNodesPass()(model)
