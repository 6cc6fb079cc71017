"""Read the precision in which each module really runs from an opened engine.

EngineInspector.get_engine_information(JSON), for an engine built with DETAILED verbosity:

    {"Layers": [{"Name": "__myl_FcMulAdd_myl0_25", "LayerType": "gemm",
                 "Inputs":  [{"Name": ..., "Dimensions": [...], "Format/Datatype": "Int8"}, ...],
                 "Outputs": [...], "Weights": {"Type": "Int8", "Count": ...},
                 "TacticName": "sm80_xmma_gemm_i8i8_i8i32_f32_tn_n_tilesize128x128x64_...",
                 "Metadata": "[ONNX Layer: a/MatMul]\\x1f[ONNX Layer: a/add]"}, ...],
     "Bindings": [...]}

https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/engine-tools.html
TensorRT 11 renames Bindings to "I/O Tensors" and splits "Format/Datatype" in two (its migration
page); both forms are read. The type of a tensor with a dynamic shape is "N/A due to dynamic shapes"
unless the inspector has a context with shapes. Without DETAILED a layer has only its name. The
second letter group in a GEMM's name gives the types of its operands and its sums: i8i32, f16f32,
tf32f32, e4m3f32.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import MachineError
from .build.network import QUANTIZED
from .validity import refuse_invalid

TYPES = {
    "Float": "FLOAT",
    "FP32": "FLOAT",
    "Half": "HALF",
    "FP16": "HALF",
    "BFloat16": "BF16",
    "BF16": "BF16",
    "Int8": "INT8",
    "INT8": "INT8",
    "Int4": "INT4",
    "INT4": "INT4",
    "FP8": "FP8",
    "FP4": "FP4",
}
KERNELS = {  # letter group of a kernel's name -> type of its operands
    "i8": "INT8",
    "e4m3": "FP8",
    "e2m1": "FP4",
    "f16": "HALF",
    "bf16": "BF16",
    "tf32": "FLOAT",
    "f32": "FLOAT",
}
BITS = {"FLOAT": 32, "HALF": 16, "BF16": 16, "INT8": 8, "FP8": 8, "INT4": 4, "FP4": 4}
MULTIPLIES = 1  # highest rank of kernels that multiply
HEADER = 4096  # bytes, more than any product needs
SOURCE = re.compile(r"\[ONNX Layer: ([^\]\x1d-\x1f]+)\]")
GEMM = re.compile(r"_(?:gemm|fprop|conv)\w*?_(?:(?:b?f|tf|i|e\dm)\d+){2}_(b?f\d+|tf32|i8|e\dm\d)")


def inspect_engine(
    trt: Any, log: Any, plan: Any, modules: Mapping[str, Any], *, host_code: bool = False
) -> dict[str, Any] | None:
    """Return `read_layers` of a new TensorRT engine; None if it cannot be opened on this machine.

    host_code: see TrtRunner.
    """
    before = len(log.messages)
    try:
        refuse_invalid(bytes(memoryview(plan)[:HEADER]), trt)
        runtime = trt.Runtime(log)
        if host_code:
            runtime.engine_host_code_allowed = True
        engine = runtime.deserialize_cuda_engine(plan)
    except (MachineError, RuntimeError, TypeError):
        engine = None
    if engine is None:
        del log.messages[before:]  # messages about the missing GPU
        return None
    return read_layers(layer_information(trt, engine), modules)


def layer_information(trt: Any, engine: Any) -> str:
    """Return the JSON of TensorRT's engine inspector on all layers, with types for the opt shapes
    of the first profile."""
    inspector = engine.create_engine_inspector()
    context = engine.create_execution_context()
    if context is not None:
        for i in range(engine.num_io_tensors):
            name = engine.get_tensor_name(i)
            if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT:
                context.set_input_shape(name, engine.get_tensor_profile_shape(name, 0)[1])
        inspector.execution_context = context
    return str(inspector.get_engine_information(trt.LayerInformationFormat.JSON))


def read_layers(text: str, modules: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return {module: {"layer", "tactic", "multiplies", "weight", "fused"}} of a TensorRT engine's
    layers.

    text: JSON of `layer_information`.
    modules: {module: {"product": ONNX node that multiplies by its weight}}.

    multiplies: operand type in the kernel's name, else the common type of its inputs and weights,
        else None.
    weight: narrowest type among the kernel's inputs and weights; None if no type is reported, or if
        a quantized type may belong to another module of the same kernel.
    fused: the other ONNX nodes of the kernels.
    Several kernels of a module that multiply give the widest type. A module that no layer names is
    left out.
    """
    kernels = {}
    layers = [x for x in json.loads(text).get("Layers", []) if isinstance(x, dict)]
    sources = [(layer, SOURCE.findall(layer.get("Metadata", ""))) for layer in layers]
    for module, entry in modules.items():
        node = entry["product"]
        running = [(layer, names) for layer, names in sources if node in names]
        if running:
            first = min(running, key=lambda pair: _rank(pair[0]))
            several = [pair for pair in running if _rank(pair[0]) <= MULTIPLIES] or [first]
            products = [other["product"] for other in modules.values()]
            layer = max(several, key=lambda pair: BITS.get(_multiplies(pair[0]) or "", 0))[0]
            kernels[module] = {
                "layer": layer.get("Name", ""),
                "tactic": layer.get("TacticName", ""),
                "multiplies": _widest([_multiplies(one) for one, _ in several]),
                "weight": _widest([_weight(one, names, products) for one, names in several]),
                "fused": sorted({n for _, names in several for n in names} - {node}),
            }
    return kernels


def _widest(types: Sequence[str | None]) -> str | None:
    """Return the widest of the types in which an engine's kernel computes; None if a kernel without
    a type may have higher precision."""
    widest = max((t for t in types if t), key=lambda t: BITS[t], default=None)
    return None if widest in QUANTIZED and None in types else widest


def _weight(layer: Mapping[str, Any], names: Sequence[str], products: Sequence[str]) -> str | None:
    """Return the narrowest type of the inputs and weights of an engine's kernel; None if that is a
    quantized type and several modules share the kernel.

    names: ONNX nodes of the kernel
    products: ONNX nodes that multiply by a weight, of all modules
    """
    narrowest = _narrowest(layer)
    shared = sum(node in names for node in products) > 1
    return None if shared and narrowest in QUANTIZED else narrowest


def precision_fallbacks(
    schemes: Mapping[str, Mapping[str, str]], kernels: Mapping[str, Any]
) -> dict[str, str]:
    """Return {module: requested and actual precision} of modules that TensorRT runs in higher
    precision.

    schemes: {module: {"weight": "int8 channel", "activation": "int8" | "float"}} of lowering.json.
    kernels: result of `read_layers`.
    Modules without a reported type are skipped; see `list_unreported_modules`.
    """
    fallbacks = {}
    for module, scheme in schemes.items():
        kernel = kernels.get(module)
        actual = _actual(scheme, kernel)
        if kernel is None or actual is None:
            continue
        kind, bits = _required(scheme)
        if BITS[actual] > bits:
            fallbacks[module] = f"{kind} requested, {actual.lower()} in {kernel['layer']}"
    return fallbacks


def list_unreported_modules(
    schemes: Mapping[str, Mapping[str, str]], kernels: Mapping[str, Any]
) -> list[str]:
    """Return the modules whose precision the TensorRT engine does not report."""
    return sorted(m for m, scheme in schemes.items() if _actual(scheme, kernels.get(m)) is None)


def _required(scheme: Mapping[str, str]) -> tuple[str, int]:
    """Return a module's requested type as text, to compare the engine's, and its bits: of the
    activation if it is quantized, else of the weight."""
    if scheme["activation"] != "float":
        return f"{scheme['activation']} activations", 8
    kind = scheme["weight"].split()[0]
    return f"{kind} weights", int(re.sub(r"\D", "", kind))


def _actual(scheme: Mapping[str, str], kernel: Mapping[str, Any] | None) -> str | None:
    if kernel is None:
        return None
    which = "multiplies" if scheme["activation"] != "float" else "weight"
    kind: str | None = kernel[which]
    return kind


def _rank(layer: Mapping[str, Any]) -> int:
    """Return 0 for a TensorRT kernel that certainly multiplies, up to 3 for a reformat.

    Copies and casts around a product name the same ONNX node as the product itself.
    """
    tactic, kind = layer.get("TacticName", ""), str(layer.get("LayerType", "")).lower()
    if GEMM.search(tactic):
        return 0
    if any(word in kind for word in ("gemm", "matrix", "conv")) or "gemm" in tactic:
        return 1
    return 2 if "reformat" not in kind else 3


def _multiplies(layer: Mapping[str, Any]) -> str | None:
    match = GEMM.search(layer.get("TacticName", ""))
    if match:
        return KERNELS.get(match[1])
    types = set(_types(layer))
    return types.pop() if len(types) == 1 else None


def _narrowest(layer: Mapping[str, Any]) -> str | None:
    return min(_types(layer), key=lambda t: BITS[t], default=None)


def _types(layer: Mapping[str, Any]) -> list[str]:
    """Return the types that TensorRT reports for a layer's inputs and weights."""
    types = [_type(t) for t in layer.get("Inputs", [])]
    weights = layer.get("Weights")
    if isinstance(weights, dict):
        types.append(TYPES.get(str(weights.get("Type"))))
    return [t for t in types if t]


def _type(tensor: Mapping[str, Any]) -> str | None:
    """Return the float or quantized type that TensorRT reports of a tensor; None for indices and
    unreported types."""
    for key in ("Format/Datatype", "DataType", "Datatype"):
        label = str(tensor.get(key, ""))
        for word in re.findall(r"\w+", label):
            if word in TYPES:
                return TYPES[word]
    return None
