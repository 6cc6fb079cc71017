"""Read the kernel and precision of each layer of a compiled OpenVINO model.

CompiledModel.get_runtime_model() is the graph after all fusions. Each node's rt_info (namespace
ov::exec_model_info) holds layerType, primitiveType (the kernel, e.g. "brgemm_avx512_i8"),
originalLayersNames (nodes of the file, comma-separated) and outputPrecisions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kernel:
    """Kernel that runs one node of the graph that OpenVINO compiled.

    kind: layerType
    primitive: primitiveType, the name of the implementation
    layers: names of the nodes of the file that were fused into it
    inputs: element type of each input, e.g. "i8"
    """

    name: str
    kind: str
    primitive: str
    layers: tuple[str, ...]
    inputs: tuple[str, ...]


def list_kernels(compiled: Any) -> list[Kernel]:
    """Return the kernels of an ov.CompiledModel in graph order."""
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
        layers,
        tuple(_element_type(i) for i in node.inputs()),
    )


def _element_type(port: Any) -> str:
    return str(port.get_element_type().get_type_name())
