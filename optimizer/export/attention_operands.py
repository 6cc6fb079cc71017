"""Find the operands of an attention's two products: query, key, value, and the probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from optimizer.export.names import ModuleInGraph, OperatorInput
from optimizer.export.scopes import module_of
from optimizer.foundation.errors import OptimizeError
from optimizer.model.architectures.operands import find_attention


def find(
    model: ir.Model, modules: Mapping[str, ModuleInGraph], operands: Iterable[str]
) -> dict[str, OperatorInput]:
    """Find in the exported graph the tensor of every operand, and the operator that reads it.

    modules: linear modules of names.json
    operands: names of the identities around the products (model/architectures/operands.py)

    Returns {operand: OperatorInput}.
    Raises OptimizeError for an operand that is not one tensor with one reader.
    """
    nodes = {str(n.name): n for n in model.graph}
    softmaxes: dict[str, list[ir.Value]] = {}
    for node in model.graph:
        if node.op_type == "Softmax":
            softmaxes.setdefault(module_of(node), []).append(node.outputs[0])
    uses = {}
    for name in operands:
        attention, child = find_attention(name), name.rpartition(".")[2]
        linear = modules.get(f"{attention}.{child}")
        tensors = softmaxes.get(attention, []) if linear is None else [_result(nodes[linear.node])]
        readers = [n for value in tensors for n, _ in value.uses()]
        if len(tensors) != 1 or len(readers) != 1:
            raise OptimizeError(
                f"{name} is an operand of {attention}, and the exported graph has "
                f"{len(tensors)} such tensors with {len(readers)} readers, not one with one",
                where="export",
                fix="Use quantize.activations.attention: float, and report the architecture.",
            )
        uses[name] = OperatorInput(str(readers[0].name), str(tensors[0].name))
    return uses


def _result(product: ir.Node) -> ir.Value:
    """Output in the exported graph of the linear module of `product`, a MatMul: of the Add of its
    bias if it has one."""
    users = [n for n, _ in product.outputs[0].uses()]
    biased = len(users) == 1 and module_of(users[0]) == module_of(product)
    return users[0].outputs[0] if biased else product.outputs[0]
