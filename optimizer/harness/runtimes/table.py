"""Table of runtimes: what each needs and where it runs. It imports no runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from .trt.products import PRODUCTS, TensorRtProduct

TENSORRT, RTX = PRODUCTS["tensorrt"].distributions, PRODUCTS["tensorrt-rtx"].distributions
RTX_PLUGIN = tuple(f"onnxruntime-ep-nv-tensorrt-rtx{cuda}" for cuda in ("", "-cu13", "-cu12"))
CUDA_BINDINGS = ("cuda-bindings",)
VLLM = "vllm"
"""Runtime that `serve` and `bench` start as a process of its own."""
Groups = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Runtime:
    """Facts about one runtime. bundle/engines.py opens its models and engines.

    required: {provider or device: groups of distributions}, of which one of each group must be
        installed; the first group is the runtime, whose version is checked; empty if the harness
        does not run it
    product: product of the TensorRT family, for engine files that fit only some machines; None: the
        runtime runs the portable model
    served_by: programs that run its models, if the harness does not
    devices: module, relative to this folder, with the functions `list_devices` and `explain_absent`
        (openvino/devices.py), for a runtime that lists its devices; "" for others
    reentrant: providers or devices on which several threads may call `infer` of one model at once
    saturates: True if its int8 products are wrong on a CPU without VNNI; such models are refused
        there
    """

    name: str
    required: Mapping[str, Groups] = field(default_factory=dict)
    product: TensorRtProduct | None = None
    served_by: str = ""
    devices: str = ""
    reentrant: tuple[str, ...] = ()
    saturates: bool = False

    @property
    def runs(self) -> bool:
        """Return True if the harness runs this runtime (ONNX Runtime, TensorRT ...)."""
        return bool(self.required)

    @property
    def engine_files(self) -> bool:
        """Return True if the runtime runs engine files instead of the portable model."""
        return self.product is not None

    @property
    def needs_gpu(self) -> bool:
        """Return True if building an engine needs a GPU."""
        return self.product is not None and self.product.needs_gpu

    @property
    def driver_minimum(self) -> str:
        """Return the oldest accepted GPU driver, or ""."""
        return "" if self.product is None else self.product.driver_minimum

    @property
    def versions(self) -> tuple[str, str] | None:
        """Return (oldest accepted version, first rejected version) of the runtime; None: any
        version."""
        return None if self.product is None else self.product.versions

    @property
    def compute_capabilities(self) -> tuple[str, ...]:
        """Return the GPUs that an engine can be built for, e.g. "8.9"; empty: only this machine's
        GPU."""
        return () if self.product is None else self.product.compute_capabilities

    def lister(self) -> Any:
        """Import the Python module that lists this runtime's devices, and return it."""
        return import_module(self.devices, __package__)


RUNTIMES: dict[str, Runtime] = {
    r.name: r
    for r in (
        Runtime(
            "onnxruntime",
            required={
                "cpu": (("onnxruntime", "onnxruntime-gpu"),),
                "cuda": (("onnxruntime-gpu",),),
                "tensorrt": (("onnxruntime-gpu",), TENSORRT),
                "tensorrt-rtx": (("onnxruntime",), RTX_PLUGIN),
            },
            reentrant=("cpu",),  # InferenceSession.run is thread-safe; other providers are untested
        ),
        Runtime(
            "tensorrt-rtx",
            required={"cuda": (RTX, CUDA_BINDINGS)},
            product=PRODUCTS["tensorrt-rtx"],
        ),
        Runtime(
            "tensorrt",
            required={"cuda": (TENSORRT, CUDA_BINDINGS)},
            product=PRODUCTS["tensorrt"],
        ),
        Runtime(
            "openvino",
            required=dict.fromkeys(("cpu", "gpu", "npu"), (("openvino",),)),
            devices=".openvino.devices",
            saturates=True,
        ),
        Runtime("onnxruntime-web", served_by="a browser (python -m harness web)"),
        Runtime("compressed-tensors", served_by="transformers or vLLM"),
        Runtime(VLLM, served_by="vLLM (optimize serve, optimize bench)"),
        Runtime("gguf", served_by="llama.cpp (llama-server -m model.gguf)"),
    )
}


def look_up(name: str) -> Runtime:
    """Return the Runtime of a name such as "openvino"; an unknown name gives a Runtime whose `runs`
    is False."""
    return RUNTIMES.get(name) or Runtime(name)


def is_reentrant(engine: Mapping[str, Any]) -> bool:
    """Return True if several threads may run an engine at once. engine: its manifest entry."""
    return (engine.get("provider") or engine["device"]) in look_up(engine["runtime"]).reentrant
