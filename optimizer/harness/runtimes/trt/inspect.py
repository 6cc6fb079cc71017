"""What an opened engine says of its layers: the precision each module really runs in.

EngineInspector.get_engine_information(JSON), for an engine built with DETAILED verbosity:

    {"Layers": [{"Name": "__myl_FcMulAdd_myl0_25", "LayerType": "gemm",
                 "Inputs":  [{"Name": ..., "Dimensions": [...], "Format/Datatype": "Int8"}, ...],
                 "Outputs": [...], "Weights": {"Type": "Int8", "Count": ...},
                 "TacticName": "sm80_xmma_gemm_i8i8_i8i32_f32_tn_n_tilesize128x128x64_...",
                 "Metadata": "[ONNX Layer: a/MatMul]\\x1f[ONNX Layer: a/add]"}, ...],
     "Bindings": [...]}

https://docs.nvidia.com/deeplearning/tensorrt/latest/inference-library/engine-tools.html
TensorRT 11 calls Bindings "I/O Tensors" and splits "Format/Datatype" in two (its migration page);
both forms are read. A dynamic shape has "N/A due to dynamic shapes" for a type unless the
inspector is given a context with its shapes set. Without DETAILED a layer is only its name.
The second group of letters in a GEMM's name is what it multiplies and what it sums in:
i8i32, f16f32, tf32f32, e4m3f32.
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
KERNELS = {  # a letter group of a kernel's name -> what it multiplies
    "i8": "INT8",
    "e4m3": "FP8",
    "e2m1": "FP4",
    "f16": "HALF",
    "bf16": "BF16",
    "tf32": "FLOAT",
    "f32": "FLOAT",
}
BITS = {"FLOAT": 32, "HALF": 16, "BF16": 16, "INT8": 8, "FP8": 8, "INT4": 4, "FP4": 4}
MULTIPLIES = 1  # the last rank of kernels that multiply
HEADER = 4096  # bytes, more than any product asks for
SOURCE = re.compile(r"\[ONNX Layer: ([^\]\x1d-\x1f]+)\]")
GEMM = re.compile(r"_(?:gemm|fprop|conv)\w*?_(?:(?:b?f|tf|i|e\dm)\d+){2}_(b?f\d+|tf32|i8|e\dm\d)")


def inspect_engine(
    trt: Any, log: Any, plan: Any, modules: Mapping[str, Any], *, host_code: bool = False
) -> dict[str, Any] | None:
    """`read_layers` of an engine that was just built; None where it cannot be opened (no GPU, or
    another): the runtime is asked by the header first. host_code: see TrtRunner."""
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
        del log.messages[before:]  # what it says is that there is no such GPU
        return None
    return read_layers(layer_information(trt, engine), modules)


def layer_information(trt: Any, engine: Any) -> str:
    """The inspector's JSON, types told for the first profile's middle shapes."""
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
    """{module: {"layer", "tactic", "multiplies", "weight", "fused"}} of an engine's layers.

    modules: {module: {"product": the ONNX node that multiplies by its weight}}. multiplies: the
    type the kernel's name says, else the type all its inputs and weights have, else None. weight:
    the narrowest type among the kernel's inputs and weights, None when none is told, and when that
    may be another module's, which shares the kernel. Of several kernels that multiply, the widest.
    fused: the other ONNX nodes they run. A module that no layer names is left out.
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
    """None when a kernel that does not tell may be of higher precision than those that do."""
    widest = max((t for t in types if t), key=lambda t: BITS[t], default=None)
    return None if widest in QUANTIZED and None in types else widest


def _weight(layer: Mapping[str, Any], names: Sequence[str], products: Sequence[str]) -> str | None:
    """`_narrowest`, unless it is a code in a kernel of several modules: one of them may be wide."""
    narrowest = _narrowest(layer)
    shared = sum(node in names for node in products) > 1
    return None if shared and narrowest in QUANTIZED else narrowest


def precision_fallbacks(
    schemes: Mapping[str, Mapping[str, str]], kernels: Mapping[str, Any]
) -> dict[str, str]:
    """{module: what was requested and what it runs in} of those in higher precision.

    schemes: {module: {"weight": "int8 channel", "activation": "int8" | "float"}}, as lowering.json
    has it. A module whose kernel tells no type is not judged; see `untold`.
    """
    fallbacks = {}
    for module, scheme in schemes.items():
        kernel = kernels.get(module)
        actual = _actual(scheme, kernel)
        if kernel is None or actual is None:
            continue
        kind, bits = _required(scheme)
        if BITS[actual] > bits:
            fallbacks[module] = f"{kind} asked, {actual.lower()} in {kernel['layer']}"
    return fallbacks


def untold(schemes: Mapping[str, Mapping[str, str]], kernels: Mapping[str, Any]) -> list[str]:
    """Modules of which the engine does not say what they run in."""
    return sorted(m for m, scheme in schemes.items() if _actual(scheme, kernels.get(m)) is None)


def _required(scheme: Mapping[str, str]) -> tuple[str, int]:
    """What was asked of a module, and its bits: of the activation if that is coded."""
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
    """Products first: a node may also be named by the copies and casts around it."""
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
    """Those that are told, of the inputs and the weights."""
    types = [_type(t) for t in layer.get("Inputs", [])]
    weights = layer.get("Weights")
    if isinstance(weights, dict):
        types.append(TYPES.get(str(weights.get("Type"))))
    return [t for t in types if t]


def _type(tensor: Mapping[str, Any]) -> str | None:
    """The float or code type of a tensor; None for indices, and where it is not told."""
    for key in ("Format/Datatype", "DataType", "Datatype"):
        label = str(tensor.get(key, ""))
        for word in re.findall(r"\w+", label):
            if word in TYPES:
                return TYPES[word]
    return None
