"""Read from OpenVINO's runtime model which modules run in integer kernels.

A module is found by the name of its product in the lowered graph, or of its bias's Add: layers of a
kernel begin with one of these ("<module>/MatMul/DequantizationMultiply"). It counts as fused where
every kernel of its products reads integer weights, and integer inputs if these are quantized. A
product that no kernel names counts as run in higher precision. An embedding counts as fused where
rows are taken from integers. An attention with quantized operands is in "wider" where its kernels
read floats.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from optimizer.export.scopes import MODULE
from optimizer.harness.runtimes.openvino.kernels import Kernel
from optimizer.lower.onnx.lookup import IDS
from optimizer.model.architectures.operands import find_attention

PRODUCTS = ("MatMul", "Gemm", "Conv")
MULTIPLIES = frozenset({"FullyConnected", "MatMul", "Convolution"})
TAKES_ROWS = frozenset({"Gather"})
OF_ATTENTION = frozenset({"Subgraph", "MatMul"})
ATTENTIONS = ("ScaledDotProductAttention", "PagedAttention")
INTEGERS = frozenset({"i8", "u8", "i4", "u4"})
UNTOLD = "no kernel of the runtime model names it"


def inspect(lowered_folder: Path, kernels: Sequence[Kernel]) -> dict[str, Any]:
    """Inspect the kernels in which OpenVINO runs the lowered graph. Returns:

    eligible, fused    number of modules lowered to integers, and of those in integer kernels only
    wider, why_wider   names of modules not fused and of attentions on floats, and {name: reason}
    operators          {kernel: number of products, or of attentions}
    """
    document = json.loads((lowered_folder / "lowering.json").read_text(encoding="utf-8"))
    modules = document["modules"]
    uses = _uses(lowered_folder / "model.onnx", modules)
    why_wider: dict[str, str] = {}
    counts: dict[str, int] = {}
    for name, entry in modules.items():
        for layers in uses.get(name) or [()]:
            rows = entry["activation"] == IDS
            kernel = _kernel(layers, TAKES_ROWS if rows else MULTIPLIES, kernels)
            integers = _table(kernel) if rows else _weight(kernel)
            reason = _in_float(kernel, integers, entry["activation"] not in ("float", IDS))
            if reason:
                why_wider[name] = reason
            elif kernel is not None:
                label = f"{kernel.kind} {integers}"
                counts[label] = counts.get(label, 0) + 1
    for kernel in kernels:
        if kernel.kind in ATTENTIONS:
            counts[kernel.kind] = counts.get(kernel.kind, 0) + 1
    in_float = len(why_wider)
    attentions = dict.fromkeys(map(find_attention, document.get("summands", ())))
    for name in filter(None, attentions):
        why = _multiplies_floats(name, kernels)
        why_wider |= {name: why} if why else {}
    return {
        "eligible": len(modules),
        "fused": len(modules) - in_float,
        "wider": sorted(why_wider),
        "why_wider": dict(sorted(why_wider.items())),
        "operators": dict(sorted(counts.items())),
    }


def _multiplies_floats(attention: str, kernels: Sequence[Kernel]) -> str:
    """Return the reason why OpenVINO computes an attention's products in float; "" for integers.

    Products are in integers where all operands are: queries, keys and values of one fused kernel,
    or both operands of each of two kernels."""
    own = [
        k
        for k in kernels
        if k.kind in OF_ATTENTION and any(n.startswith(f"{attention}/") for n in k.layers)
    ]
    integers = sum(kind in INTEGERS for k in own for kind in k.inputs)
    if integers >= (3 if len(own) == 1 else 4):
        return ""
    read = "; ".join(f"{', '.join(k.inputs)} in {k.kind} ({k.primitive})" for k in own)
    return f"its products read {read}" if own else UNTOLD


def _uses(model: Path, modules: Mapping[str, Any]) -> dict[str, list[tuple[str, ...]]]:
    """Return {module: names of its operators in the lowered graph, one tuple per use}: a product
    and its bias's Add, or a Gather of its integers."""
    graph = onnx.load(model, load_external_data=False).graph
    users: dict[str, list[onnx.NodeProto]] = {}
    for node in graph.node:
        for operand in node.input:
            users.setdefault(operand, []).append(node)
    results = {output.name for output in graph.output}
    named: dict[str, list[tuple[str, ...]]] = {}
    for node in graph.node:
        name = _module(node)
        if node.op_type in PRODUCTS and name in modules:
            after = users.get(node.output[0], [])
            biased = [n.name for n in after if n.op_type == "Add" and _module(n) == name]
            named.setdefault(name, []).append((node.name, *biased, *_answered(node, results)))
        elif node.op_type in TAKES_ROWS and node.input[0] == modules.get(name, {}).get("codes"):
            named.setdefault(name, []).append((node.name,))
    return named


def _answered(node: onnx.NodeProto, results: Collection[str]) -> list[str]:
    """List the outputs of a lowered graph's `node` among its `results`; OpenVINO names such a node
    by its output."""
    return [name for name in node.output if name in results]


def _module(node: onnx.NodeProto) -> str:
    return next((str(p.value) for p in node.metadata_props if p.key == MODULE), "")


def _kernel(
    layers: Sequence[str], kinds: frozenset[str], kernels: Sequence[Kernel]
) -> Kernel | None:
    """Find the first kernel of these kinds in which OpenVINO runs one of the layers; None without
    any."""
    of_kind = (k for k in kernels if k.kind in kinds)
    return next((k for k in of_kind if any(map(_stands_for(layers), k.layers))), None)


def _stands_for(layers: Sequence[str]) -> Callable[[str], bool]:
    return lambda name: any(name == layer or name.startswith(f"{layer}/") for layer in layers)


def _in_float(kernel: Kernel | None, weight: str, quantized_input: bool) -> str:
    """Explain why a kernel of OpenVINO is not one that multiplies integers, or "" where it is."""
    if kernel is None:
        return UNTOLD
    if weight not in INTEGERS:
        return f"its weight is {weight} in {kernel.kind} ({kernel.primitive})"
    if quantized_input and kernel.inputs[0] not in INTEGERS:
        return f"its input is {kernel.inputs[0]} in {kernel.kind} ({kernel.primitive})"
    return ""


def _weight(kernel: Kernel | None) -> str:
    return kernel.inputs[1] if kernel and len(kernel.inputs) > 1 else "missing"


def _table(kernel: Kernel | None) -> str:
    return kernel.inputs[0] if kernel and kernel.inputs else "missing"
