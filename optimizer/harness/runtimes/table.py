"""The runtimes that the harness can run, one record each. It imports none of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from .trt.products import PRODUCTS, Product

TENSORRT, RTX = PRODUCTS["tensorrt"].distributions, PRODUCTS["tensorrt-rtx"].distributions
RTX_PLUGIN = tuple(f"onnxruntime-ep-nv-tensorrt-rtx{cuda}" for cuda in ("", "-cu13", "-cu12"))
CUDA_BINDINGS = ("cuda-bindings",)
Groups = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Runtime:
    """One runtime.

    required: {provider or device: groups of distributions}; of each group one must be installed,
    and the first group's is the runtime, whose version counts; empty: the harness does not run it,
    and served_by says what does.
    product: of a runtime that has engine files of its own, which fit some
    machines only; None: it runs the portable model itself. devices: a module, from this folder,
    with `available` and `absent` as openvino/devices.py has them, of a runtime that alone knows
    which of its devices are here. reentrant: providers or devices on which several threads may call
    one open model's `infer` at once.
    """

    name: str
    required: Mapping[str, Groups] = field(default_factory=dict)
    product: Product | None = None
    served_by: str = ""
    devices: str = ""
    reentrant: tuple[str, ...] = ()

    @property
    def runs(self) -> bool:
        """Whether this version of the harness runs it."""
        return bool(self.required)

    @property
    def engine_files(self) -> bool:
        return self.product is not None

    @property
    def needs_gpu(self) -> bool:
        """To build at all."""
        return self.product is not None and self.product.needs_gpu

    @property
    def driver_minimum(self) -> str:
        return "" if self.product is None else self.product.driver_minimum

    @property
    def versions(self) -> tuple[str, str] | None:
        """The oldest accepted, and the first that is not; None: any."""
        return None if self.product is None else self.product.versions

    @property
    def compute_capabilities(self) -> tuple[str, ...]:
        """The GPUs an engine can be built for by name; none: it is built for the one present."""
        return () if self.product is None else self.product.compute_capabilities

    def lister(self) -> Any:
        """The module of `devices`."""
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
            reentrant=("cpu",),  # InferenceSession.run is thread-safe; others were not tried
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
        ),
        Runtime("onnxruntime-web", served_by="a browser (python -m harness web)"),
        Runtime("compressed-tensors", served_by="transformers or vLLM"),
        Runtime("gguf", served_by="llama.cpp (llama-server -m model.gguf)"),
    )
}


def of(name: str) -> Runtime:
    """The record of a runtime; of one that is not in the table, a record that nothing runs."""
    return RUNTIMES.get(name) or Runtime(name)


def reentrant(engine: Mapping[str, Any]) -> bool:
    """Whether several threads may run this engine of a manifest at once."""
    return (engine.get("provider") or engine["device"]) in of(engine["runtime"]).reentrant
