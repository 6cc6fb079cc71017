"""What OpenVINO really runs in integer kernels, read from its runtime model.

A module is found by the name of its product in the lowered graph, or of the Add of its bias: one of
these the layers of the kernel begin with ("<module>/MatMul/DequantizationMultiply"). It counts as
fused when every kernel that stands for one of its products takes integers as weights, and for a
quantized input integers there too. A product that no kernel names cannot be judged, and counts as
run in higher precision.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from optimizer.export.clean import MODULE
from optimizer.harness.runtimes.openvino.kernels import Kernel

PRODUCTS = ("MatMul", "Gemm")
MULTIPLIES = frozenset({"FullyConnected", "MatMul"})
INTEGERS = frozenset({"i8", "u8", "i4", "u4"})
UNTOLD = "no kernel of the runtime model names it"


def inspect(lowered_folder: Path, kernels: Sequence[Kernel]) -> dict[str, Any]:
    """{"eligible": modules lowered to integers, "fused": those in integer kernels wherever they are
    used, "wider": the names of the others, "why_wider": {name: why}, "operators": {kernel: how many
    modules' products it runs}}."""
    modules = json.loads((lowered_folder / "lowering.json").read_text(encoding="utf-8"))["modules"]
    products = _products(lowered_folder / "model.onnx", modules)
    why_wider: dict[str, str] = {}
    counts: dict[str, int] = {}
    for name, entry in modules.items():
        for layers in products.get(name) or [()]:
            kernel = _kernel(layers, kernels)
            reason = _in_float(kernel, entry["activation"] != "float")
            if reason:
                why_wider[name] = reason
            elif kernel is not None:
                label = f"{kernel.kind} {_weight(kernel)}"
                counts[label] = counts.get(label, 0) + 1
    return {
        "eligible": len(modules),
        "fused": len(modules) - len(why_wider),
        "wider": sorted(why_wider),
        "why_wider": dict(sorted(why_wider.items())),
        "operators": dict(sorted(counts.items())),
    }


def _products(model: Path, modules: Mapping[str, Any]) -> dict[str, list[tuple[str, ...]]]:
    """{module: of each operator that multiplies by its weight, its name and that of the Add of the
    bias}."""
    graph = onnx.load(model, load_external_data=False).graph
    users: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for operand in node.input:
            users.setdefault(operand, []).append(node)
    named: dict[str, list[tuple[str, ...]]] = {}
    for node in graph.node:
        if node.op_type in PRODUCTS and _module(node) in modules:
            after = users.get(node.output[0], [])
            biased = [n.name for n in after if n.op_type == "Add" and _module(n) == _module(node)]
            named.setdefault(_module(node), []).append((node.name, *biased))
    return named


def _module(node: onnx.NodeProto) -> str:
    return next((str(p.value) for p in node.metadata_props if p.key == MODULE), "")


def _kernel(layers: Sequence[str], kernels: Sequence[Kernel]) -> Kernel | None:
    """The one that multiplies, of those that stand for operators of the file."""
    of_product = (k for k in kernels if k.kind in MULTIPLIES)
    return next((k for k in of_product if any(map(_stands_for(layers), k.layers))), None)


def _stands_for(layers: Sequence[str]) -> Callable[[str], bool]:
    return lambda name: any(name == layer or name.startswith(f"{layer}/") for layer in layers)


def _in_float(kernel: Kernel | None, quantized_input: bool) -> str:
    """Why the kernel is none of integers, or ""."""
    if kernel is None:
        return UNTOLD
    if _weight(kernel) not in INTEGERS:
        return f"its weight is {_weight(kernel)} in {kernel.kind} ({kernel.primitive})"
    if quantized_input and kernel.inputs[0] not in INTEGERS:
        return f"its input is {kernel.inputs[0]} in {kernel.kind} ({kernel.primitive})"
    return ""


def _weight(kernel: Kernel) -> str:
    return kernel.inputs[1] if len(kernel.inputs) > 1 else "missing"
