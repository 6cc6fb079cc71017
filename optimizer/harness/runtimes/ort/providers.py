"""ONNX Runtime's execution providers: what each is called, what it needs, how it is started.

    cpu            in every build
    cuda           onnxruntime-gpu
    tensorrt       onnxruntime-gpu and TensorRT: it compiles the parts of the graph it can
    tensorrt-rtx   onnxruntime and the plugin onnxruntime-ep-nv-tensorrt-rtx, which brings its own
                   TensorRT-RTX (nvidia.github.io/TensorRT-RTX-EP-ABI); not beside onnxruntime-gpu

A provider takes the nodes it can, and ONNX Runtime gives the others to the next one without a
word, the CPU last. `refuse_elsewhere` makes the case where nothing is left an error, and
`placement` says where every node went.
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
"""Operators whose work grows with the model's width: on the CPU they are a fallback."""


@dataclass(frozen=True)
class Provider:
    """name: as ONNX Runtime has it. device: where its arrays live. fix: what makes it available.
    libraries: what makes it start. after: providers that take what it leaves. graph: its option
    that captures CUDA graphs, one for each gpu_graph_id; the TensorRT providers keep a single one
    whatever the id (their sources: one `cuda_graph_` a provider, captured once), which would
    answer a second shape with the first's, and so have none. options: given always;
    precision is what the ONNX says, so TF32 is off. plugin: the module that brings it, "" when it
    is built in."""

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
CUDA_LIBRARIES = 'Install them: pip install "onnxruntime-gpu[cuda,cudnn]", or use device: cpu.'
PROVIDERS = {
    "cpu": Provider("CPUExecutionProvider", "cpu"),
    "cuda": Provider(
        "CUDAExecutionProvider",
        "cuda",
        fix=GPU_BUILD,
        libraries=CUDA_LIBRARIES,
        graph="enable_cuda_graph",
        options=(("use_tf32", "0"),),
    ),
    "tensorrt": Provider(
        "TensorrtExecutionProvider",
        "cuda",
        fix=GPU_BUILD,
        libraries="Install them: pip install tensorrt, or leave provider out to use CUDA.",
        after=("cuda",),
    ),
    "tensorrt-rtx": Provider(
        "NvTensorRTRTXExecutionProvider",
        "cuda",
        fix="pip install onnxruntime onnxruntime-ep-nv-tensorrt-rtx (not beside onnxruntime-gpu).",
        libraries="It needs an RTX GPU, Ampere or later, and its driver.",
        plugin="onnxruntime_ep_nv_tensorrt_rtx",
    ),
}


def provider(name: str) -> Provider:
    """Raises InputError for one that is not in the table."""
    if name not in PROVIDERS:
        raise InputError(
            f"device {name!r} was asked for", where="onnxruntime", accepted=", ".join(PROVIDERS)
        )
    return PROVIDERS[name]


def start(ort: Any, name: str, options: Any, *, graphs: bool) -> list[Any]:
    """Make `options` (SessionOptions) ready for the provider, and return the session's
    `providers`. Raises InputError for an unknown one or one without CUDA graphs, MachineError
    with a pip line when this ONNX Runtime has it not."""
    row = provider(name)
    if graphs and not row.graph:
        raise InputError("CUDA graphs were asked for", where=f"device {name}", accepted="cuda")
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


def _plugin_devices(ort: Any, name: str, row: Provider) -> list[Any]:
    """The plugin's devices, the library registered once per process."""
    try:
        plugin = importlib.import_module(row.plugin)
        called = plugin.get_ep_name()
        known = [d for d in ort.get_ep_devices() if d.ep_name == called]
        if not known:
            ort.register_execution_provider_library(called, plugin.get_library_path())
            known = [d for d in ort.get_ep_devices() if d.ep_name == called]
    except ImportError as e:
        raise MachineError(
            f"{row.plugin} cannot be imported ({e})", where=f"device {name}", fix=row.fix
        ) from None
    except Exception as e:  # the binding raises its own classes
        raise MachineError(
            f"{row.name} did not start ({e})", where=f"device {name}", fix=row.libraries
        ) from e
    if not known:
        raise MachineError(
            f"{row.name} finds no GPU that it runs on", where=f"device {name}", fix=row.libraries
        )
    return known


def refuse_elsewhere(name: str, running: Sequence[str], placed: Mapping[str, int]) -> None:
    """Raise MachineError when a session runs without the provider, as ONNX Runtime does in silence
    when its libraries are missing. running: the session's own list. placed: see `placement`;
    empty when unknown."""
    row = provider(name)
    if row.name not in running:
        raise MachineError(
            f"{row.name} did not start; its libraries (CUDA, cuDNN) are missing or do not fit",
            where=f"device {name}",
            fix=row.libraries,
        )
    if placed and not any(placed.get(PROVIDERS[n].name) for n in (name, *row.after)):
        raise MachineError(
            f"{row.name} takes no node of this model; all of it would run on the CPU",
            where=f"device {name}",
            fix="Use device: cpu for it.",
        )


def placement(session: Any) -> dict[str, int]:
    """{provider: nodes it runs} of a session that was opened with RECORD_PLACEMENT; empty where
    this ONNX Runtime does not say."""
    counts: dict[str, int] = {}
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return counts
    for part in session.get_provider_graph_assignment_info():
        counts[part.ep_name] = counts.get(part.ep_name, 0) + len(part.get_nodes())
    return counts


def on_cpu(session: Any) -> list[str]:
    """["name (operator)"] of the nodes of COMPUTES that the CPU runs, of a session that was opened
    with RECORD_PLACEMENT; what works out shapes belongs there."""
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return []
    return sorted(
        f"{node.name} ({node.op_type})"
        for part in session.get_provider_graph_assignment_info()
        if part.ep_name == PROVIDERS["cpu"].name
        for node in part.get_nodes()
        if node.op_type in COMPUTES
    )
