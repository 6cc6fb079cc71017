"""Summarize a network definition: inputs, outputs, layers with types, and the quantized modules.

Read before the build, because an engine cannot be opened without its GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

BITS = {
    "FLOAT": 32,
    "HALF": 16,
    "BF16": 16,
    "INT8": 8,
    "UINT8": 8,
    "BOOL": 8,
    "FP8": 8,
    "E8M0": 8,
    "INT32": 32,
    "INT64": 64,
    "INT4": 4,
    "FP4": 4,
}
QUANTIZED = ("INT8", "INT4", "FP8", "FP4")
PASSES = ("SHUFFLE", "CAST", "IDENTITY")  # between a dequantized weight and the product it enters
PRODUCTS = ("MATRIX_MULTIPLY", "CONVOLUTION", "EINSUM")


def summarize_network(network: Any, modules: Mapping[str, str]) -> dict[str, Any]:
    """Return {"inputs", "outputs", "layers", "modules", "weights"} of TensorRT's
    INetworkDefinition.

    modules: {module: name of its quantized weight}.
    Returned layers: [name, type, [output dtypes]] in order. Returned modules: {module: {"product":
    layer that multiplies by the weight, "weight": dtype of the weight, "activation": dtype of the
    quantized activation, or None}}, without modules whose weight reaches no product. Returned
    weights: see `_weights`.
    """
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    producer = {o.name: layer for layer in layers for o in _outputs(layer)}
    consumers: dict[str, list[Any]] = {}
    for layer in layers:
        for tensor in _inputs(layer):
            consumers.setdefault(tensor.name, []).append(layer)
    constants = {layer.name: layer for layer in layers if _type(layer) == "CONSTANT"}
    entries = {}
    for module, weight in modules.items():
        entry = _module(constants.get(weight), producer, consumers)
        if entry is not None:
            entries[module] = entry
    return {
        "inputs": [_tensor(network.get_input(i)) for i in range(network.num_inputs)],
        "outputs": [_tensor(network.get_output(i)) for i in range(network.num_outputs)],
        "layers": [[x.name, _type(x), [_dtype(o) for o in _outputs(x)]] for x in layers],
        "modules": entries,
        "weights": _weights(list(constants.values()), consumers),
    }


def _module(
    constant: Any, producer: Mapping[str, Any], consumers: Mapping[str, list[Any]]
) -> dict[str, Any] | None:
    """Follow in TensorRT's network a quantized weight through its dequantization to the layer that
    multiplies by it.

    Returns {"product": layer name, "weight": dtype, "activation": dtype or None}; None if the
    weight is not quantized or reaches no product.
    """
    if constant is None or _dtype(constant.get_output(0)) not in QUANTIZED:
        return None
    tensor, dequantized = constant.get_output(0), False
    while True:
        users = consumers.get(tensor.name, [])
        if not users:
            return None
        layer = users[0]
        if _type(layer) in PRODUCTS and dequantized:
            break
        if _type(layer) not in (*PASSES, "DEQUANTIZE"):
            return None
        dequantized = dequantized or _type(layer) == "DEQUANTIZE"
        tensor = layer.get_output(0)
    others = [t for t in _inputs(layer) if t.name != tensor.name]
    return {
        "product": layer.name,
        "weight": _dtype(constant.get_output(0)),
        "activation": _quantized_to(others[0], producer) if others else None,
    }


def _quantized_to(tensor: Any, producer: Mapping[str, Any]) -> str | None:
    """Return the dtype in TensorRT's network of a quantized activation before dequantization; None
    for float."""
    layer = producer.get(tensor.name)
    while layer is not None and _type(layer) in PASSES:
        layer = producer.get(layer.get_input(0).name)
    if layer is None or _type(layer) != "DEQUANTIZE":
        return None
    return _dtype(layer.get_input(0))


def _weights(constants: list[Any], consumers: Mapping[str, list[Any]]) -> dict[str, int]:
    """Measure the weights of the network from which TensorRT builds a bundle's engine: {"stored":
    bytes of the constants, "widened": their bytes when dequantized}."""
    stored = widened = 0
    for constant in constants:
        tensor = constant.get_output(0)
        bits = BITS[_dtype(tensor)]
        elements = prod(tensor.shape)
        stored += elements * bits // 8
        users = consumers.get(tensor.name, [])
        if users and _type(users[0]) == "DEQUANTIZE" and _dtype(tensor) in QUANTIZED:
            bits = BITS[_dtype(users[0].get_output(0))]
        widened += elements * bits // 8
    return {"stored": stored, "widened": widened}


def _inputs(layer: Any) -> list[Any]:
    return [t for i in range(layer.num_inputs) if (t := layer.get_input(i)) is not None]


def _outputs(layer: Any) -> list[Any]:
    return [layer.get_output(i) for i in range(layer.num_outputs)]


def _type(layer: Any) -> str:
    return str(layer.type.name)


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype.name)


def _tensor(tensor: Any) -> dict[str, Any]:
    names = [tensor.get_dimension_name(i) for i in range(len(tensor.shape))]
    axes = [n or "?" if s < 0 else s for s, n in zip(tensor.shape, names, strict=True)]
    return {"name": tensor.name, "dtype": _dtype(tensor), "axes": axes}
