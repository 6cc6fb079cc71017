"""Read biases and quantization constants around the products of a graph."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from optimizer.export.scopes import module_of
from optimizer.lower.onnx import convolution
from optimizer.lower.onnx.cut import PRODUCTS, has_weight, is_of, list_summand_operators
from optimizer.lower.onnx.graph_source import Source, open_model
from optimizer.lower.ort import product

BIASES = {  # {operator: index of its operand}
    "Gemm": 2,
    convolution.OPERATOR: convolution.BIAS,
    product.OPERATOR: product.BIAS,
}


@dataclass(frozen=True)
class InputQuantization:
    """Quantization of a module's input as a lowered graph holds it: round((x - offset) / scale) +
    zero_point."""

    scale: float
    zero_point: int
    offset: float


def read_biases(source: Source, modules: Collection[str]) -> dict[str, NDArray[Any] | None]:
    """Return {module: bias that the lowered graph adds to its product; None without one}."""
    added: dict[str, NDArray[Any] | None] = {}
    for node in open_model(source).graph:
        if node.op_type not in PRODUCTS or not is_of(node, modules) or not has_weight(node):
            continue
        module, value = module_of(node), node.outputs[0]
        place = BIASES.get(node.op_type)
        added.setdefault(module, None if place is None else _operand(node, place))
        while True:
            users = [n for n, _ in value.uses()]
            if len(users) != 1 or module_of(users[0]) != module:
                break
            if users[0].op_type == "Add":
                other = 0 if users[0].inputs[1] is value else 1
                added[module] = _operand(users[0], other)
            value = users[0].outputs[0]
    return added


def _operand(node: ir.Node, place: int) -> NDArray[Any] | None:
    value = node.inputs[place] if len(node.inputs) > place else None
    maker = None if value is None else value.producer()
    if maker is not None and maker.op_type == "DequantizeLinear":
        integers, scale = (v.const_value for v in maker.inputs if v is not None)
        if integers is None or scale is None:
            return None
        return np.asarray(integers.numpy().astype(np.float32) * scale.numpy())
    if value is None or value.const_value is None:
        return None
    return np.asarray(value.const_value.numpy())


def read_input_quantizations(
    source: Source, modules: Collection[str], summands: Collection[str] = ()
) -> dict[str, InputQuantization]:
    """Return {module: quantization} of each input that a lowered graph quantizes with constants.

    summands: names of the identities before residual adds, whose operands are included
    """
    model, by_module = open_model(source), {}
    for node in model.graph:
        if node.op_type not in PRODUCTS or not is_of(node, modules) or not has_weight(node):
            continue
        chain: list[ir.Node] = []
        step = node.inputs[0].producer() if node.inputs[0] is not None else None
        while step is not None and step.inputs and is_of(step, modules):
            if step.op_type in PRODUCTS:  # another's
                break
            chain.append(step)
            step = step.inputs[0].producer() if step.inputs[0] is not None else None
        by_module[module_of(node)] = _quantization(chain)
    for name in summands:
        by_module[name] = _quantization(list_summand_operators(model, name))
    return {name: q for name, q in by_module.items() if q is not None}


def _quantization(nodes: Sequence[ir.Node]) -> InputQuantization | None:
    """Combine these operators of a lowered graph into one quantization; None if its numbers are not
    constants."""
    scale = zero = None
    offset = 0.0
    for node in nodes:
        if node.op_type == "QuantizeLinear":
            scale = _constant(node.inputs[1])
            zero = _constant(node.inputs[2]) if len(node.inputs) > 2 else 0.0
        elif node.op_type == "Sub":
            offset = _constant(node.inputs[1]) or 0.0
    return None if scale is None or zero is None else InputQuantization(scale, int(zero), offset)


def _constant(value: ir.Value | None) -> float | None:
    """Return the single number of a lowered graph's initializer, or None."""
    if value is None or value.const_value is None or value.const_value.size != 1:
        return None
    return float(value.const_value.numpy().reshape(-1)[0])
