"""What an opened OpenVINO model runs each of its layers in: the runtime model, as data.

CompiledModel.get_runtime_model() is the graph after every fusion. Each of its nodes says in its
rt_info (namespace ov::exec_model_info): layerType, primitiveType (the kernel: "brgemm_avx512_i8"),
runtimePrecision (what it computes in), originalLayersNames (what of the file it stands for,
separated by commas), outputPrecisions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kernel:
    """One node of the runtime model. layers: names of the file's nodes that it stands for. inputs:
    the element type of each input, "i8"; computes: runtimePrecision."""

    name: str
    kind: str
    primitive: str
    computes: str
    layers: tuple[str, ...]
    inputs: tuple[str, ...]


def kernels(compiled: Any) -> list[Kernel]:
    """Of an ov.CompiledModel, in the order of its graph."""
    return [_kernel(node) for node in compiled.get_runtime_model().get_ordered_ops()]


def _kernel(node: Any) -> Kernel:
    info = node.get_rt_info()

    def text(key: str) -> str:
        return str(info[key].astype(str)) if key in info else ""

    layers = tuple(name.strip() for name in text("originalLayersNames").split(",") if name.strip())
    return Kernel(
        node.get_friendly_name(),
        text("layerType"),
        text("primitiveType"),
        text("runtimePrecision").lower(),
        layers,
        tuple(_element_type(i) for i in node.inputs()),
    )


def _element_type(port: Any) -> str:
    return str(port.get_element_type().get_type_name())
