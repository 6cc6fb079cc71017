"""Where a graph has what its attentions multiply: behind the linear layers of query, key and value,
and behind the softmax."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from optimizer.export.names import Module, Use
from optimizer.export.scopes import module_of
from optimizer.foundation.errors import OptimizeError
from optimizer.model.architectures.operands import attention_of


def find(model: ir.Model, modules: Mapping[str, Module], operands: Iterable[str]) -> dict[str, Use]:
    """The tensor that each of these modules hands on, and the one operator that reads it.

    Raises OptimizeError for one that the graph does not have so.
    """
    nodes = {str(n.name): n for n in model.graph}
    softmaxes: dict[str, list[ir.Value]] = {}
    for node in model.graph:
        if node.op_type == "Softmax":
            softmaxes.setdefault(module_of(node), []).append(node.outputs[0])
    uses = {}
    for name in operands:
        attention, child = attention_of(name), name.rpartition(".")[2]
        linear = modules.get(f"{attention}.{child}")
        tensors = softmaxes.get(attention, []) if linear is None else [_result(nodes[linear.node])]
        readers = [n for value in tensors for n, _ in value.uses()]
        if len(tensors) != 1 or len(readers) != 1:
            raise OptimizeError(
                f"{name} hands on what {attention} multiplies, and the exported graph has "
                f"{len(tensors)} such tensors with {len(readers)} readers, not one with one",
                where="export",
                fix="Use quantize.activations.attention: float, and report the architecture.",
            )
        uses[name] = Use(str(readers[0].name), str(tensors[0].name))
    return uses


def _result(product: ir.Node) -> ir.Value:
    """What a linear module gives: its product, or the Add of its bias."""
    users = [n for n, _ in product.outputs[0].uses()]
    biased = len(users) == 1 and module_of(users[0]) == module_of(product)
    return users[0].outputs[0] if biased else product.outputs[0]
