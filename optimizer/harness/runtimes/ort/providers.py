"""Execution providers of ONNX Runtime: names, requirements and options.

    cpu            in every build
    cuda           onnxruntime-gpu
    tensorrt       onnxruntime-gpu and TensorRT, which compiles the supported parts of the graph
    tensorrt-rtx   onnxruntime and the plugin onnxruntime-ep-nv-tensorrt-rtx, which brings its own
                   TensorRT-RTX (nvidia.github.io/TensorRT-RTX-EP-ABI); not beside onnxruntime-gpu

ONNX Runtime silently assigns the nodes that a provider does not support to the next provider, the
CPU last. `refuse_fallback` raises if the provider runs no node, and `count_placement` reports
where the nodes run.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import InputError, MachineError

RECORD_PLACEMENT = ("session.record_ep_graph_assignment_info", "1")

COMPUTES = frozenset(
    [
        "Attention",
        "Conv",
        "DequantizeLinear",
        "DynamicQuantizeMatMul",
        "Einsum",
        "FusedMatMul",
        "Gelu",
        "Gemm",
        "GroupQueryAttention",
        "LayerNormalization",
        "MatMul",
        "MatMulInteger",
        "MatMulIntegerToFloat",
        "MatMulNBits",
        "MultiHeadAttention",
        "QAttention",
        "QGemm",
        "QLinearMatMul",
        "QuantizeLinear",
        "RMSNormalization",
        "RotaryEmbedding",
        "SimplifiedLayerNormalization",
        "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization",
        "Softmax",
    ]
)
"""Operators that cost time; on the CPU they are a fallback."""


@dataclass(frozen=True)
class ExecutionProvider:
    """Execution provider of ONNX Runtime.

    name: name in ONNX Runtime
    device: device of its arrays, "cpu" or "cuda"
    fix: advice if this ONNX Runtime does not have it
    libraries: advice if it does not start
    after: providers that run the nodes that it does not support, before the CPU
    graph: option that captures one CUDA graph per gpu_graph_id; "" if it has none. The TensorRT
        providers capture a single graph for all ids, whose replay would be wrong for a second shape
    options: options that are always set. TF32 is off, because precision follows the ONNX file
    plugin: module of a plugin provider; "" if it is built in
    """

    name: str
    device: str
    fix: str = "pip install onnxruntime"
    libraries: str = ""
    after: tuple[str, ...] = ()
    graph: str = ""
    options: tuple[tuple[str, str], ...] = ()
    plugin: str = ""


GPU_BUILD = (
    "pip uninstall -y onnxruntime && pip install onnxruntime-gpu "
    "(they own the same module: one or the other)."
)
CUDA_LIBRARIES = (
    'Install its libraries: pip install "onnxruntime-gpu[cuda,cudnn]". If they are installed, the '
    "driver may be too old for them: nvidia-smi shows it, and CUDA 13 needs 580 or newer. Or use "
    "device: cpu."
)
PROVIDERS = {
    "cpu": ExecutionProvider("CPUExecutionProvider", "cpu"),
    "cuda": ExecutionProvider(
        "CUDAExecutionProvider",
        "cuda",
        fix=GPU_BUILD,
        libraries=CUDA_LIBRARIES,
        graph="enable_cuda_graph",
        options=(("use_tf32", "0"),),
    ),
    "tensorrt": ExecutionProvider(
        "TensorrtExecutionProvider",
        "cuda",
        fix=GPU_BUILD,
        libraries="Install TensorRT: pip install tensorrt, or leave provider out to use CUDA.",
        after=("cuda",),
    ),
    "tensorrt-rtx": ExecutionProvider(
        "NvTensorRTRTXExecutionProvider",
        "cuda",
        fix="pip install onnxruntime onnxruntime-ep-nv-tensorrt-rtx (not beside onnxruntime-gpu).",
        libraries="It needs an RTX GPU, Ampere or later, and its driver.",
        plugin="onnxruntime_ep_nv_tensorrt_rtx",
    ),
}


MEMORY = (
    "The GPU has too little free memory: nvidia-smi lists the processes that hold it. Stop one, "
    "use a GPU with more, or quantize the weights further."
)
KERNELS = (
    "This build of ONNX Runtime has no kernels for the GPU: install another version of it, or use "
    "device: cpu."
)
BY_MESSAGE = {
    "out of memory": MEMORY,
    "failed to allocate": MEMORY,
    "alloc_failed": MEMORY,
    "no kernel image": KERNELS,
}
"""{words of an error of CUDA or ONNX Runtime, in lower case: what to do}."""


def advise(name: str, message: str) -> str:
    """Return advice for a model that an execution provider of ONNX Runtime does not open.

    message: error of ONNX Runtime
    """
    for words, advice in BY_MESSAGE.items():
        if words in message.lower():
            return advice
    return find_provider(name).libraries


def find_provider(name: str) -> ExecutionProvider:
    """Find the ExecutionProvider of a name in PROVIDERS. Raises InputError for other names."""
    if name not in PROVIDERS:
        raise InputError(
            f"unknown device {name!r}", where="onnxruntime", accepted=", ".join(PROVIDERS)
        )
    return PROVIDERS[name]


def start(ort: Any, name: str, options: Any, *, graphs: bool) -> list[Any]:
    """Prepare SessionOptions for a provider; return the session's `providers` argument.

    ort: the onnxruntime module
    name: a key of PROVIDERS
    options: SessionOptions, changed in place
    graphs: True to capture CUDA graphs

    Raises InputError for an unknown provider, or one without CUDA graphs if `graphs`; MachineError
    with installation advice if this ONNX Runtime does not have the provider.
    """
    row = find_provider(name)
    if graphs and not row.graph:
        raise InputError("CUDA graphs are not supported", where=f"device {name}", accepted="cuda")
    settings = dict(row.options) | ({row.graph: "1"} if graphs else {})
    if row.plugin:
        options.add_provider_for_devices(_plugin_devices(ort, name, row), settings)
        return []
    if row.name not in ort.get_available_providers():
        raise MachineError(
            f"this ONNX Runtime has no {row.name}", where=f"device {name}", fix=row.fix
        )
    later = [(PROVIDERS[n].name, dict(PROVIDERS[n].options)) for n in row.after]
    return [(row.name, settings), *later]


def _plugin_devices(ort: Any, name: str, row: ExecutionProvider) -> list[Any]:
    """Return the devices of an execution provider's plugin; its library is registered once per
    process."""
    try:
        plugin = importlib.import_module(row.plugin)
        ep_name = plugin.get_ep_name()
        devices = [d for d in ort.get_ep_devices() if d.ep_name == ep_name]
        if not devices:
            ort.register_execution_provider_library(ep_name, plugin.get_library_path())
            devices = [d for d in ort.get_ep_devices() if d.ep_name == ep_name]
    except ImportError as e:
        raise MachineError(
            f"{row.plugin} cannot be imported ({e})", where=f"device {name}", fix=row.fix
        ) from None
    except Exception as e:  # the binding raises its own classes
        raise MachineError(
            f"{row.name} did not start ({e})", where=f"device {name}", fix=row.libraries
        ) from e
    if not devices:
        raise MachineError(
            f"{row.name} finds no GPU that it runs on", where=f"device {name}", fix=row.libraries
        )
    return devices


def refuse_fallback(name: str, running: Sequence[str], placed: Mapping[str, int]) -> None:
    """Raise MachineError if ONNX Runtime silently runs the model without the execution provider.

    running: providers of the session
    placed: result of `count_placement`; empty if unknown
    """
    row = find_provider(name)
    if row.name not in running:
        raise MachineError(
            f"{row.name} did not start: its libraries (CUDA, cuDNN) are missing, or do not fit the "
            "driver",
            where=f"device {name}",
            fix=row.libraries,
        )
    if placed and not any(placed.get(PROVIDERS[n].name) for n in (name, *row.after)):
        raise MachineError(
            f"{row.name} supports no node of this model, which would run on the CPU",
            where=f"device {name}",
            fix="Use device: cpu for it.",
        )


def count_placement(session: Any) -> dict[str, int]:
    """Return {provider: number of nodes that it runs} of a session opened with RECORD_PLACEMENT.

    Returns {} if this ONNX Runtime does not report it.
    """
    counts: dict[str, int] = {}
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return counts
    for part in session.get_provider_graph_assignment_info():
        counts[part.ep_name] = counts.get(part.ep_name, 0) + len(part.get_nodes())
    return counts


def list_nodes_on_cpu(session: Any) -> list[str]:
    """Return "name (operator)" of each node of an ONNX Runtime session that the CPU runs although a
    GPU should.

    session: session opened with RECORD_PLACEMENT

    Only operators of COMPUTES are listed; shape computations belong on the CPU.
    """
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return []
    return sorted(
        f"{node.name} ({node.op_type})"
        for part in session.get_provider_graph_assignment_info()
        if part.ep_name == PROVIDERS["cpu"].name
        for node in part.get_nodes()
        if node.op_type in COMPUTES
    )
