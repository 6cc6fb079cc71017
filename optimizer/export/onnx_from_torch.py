"""Trace a torch model to a float ONNX graph with torch.onnx.export(dynamo=True).

The graph is exported unoptimized, because the exporter's optimization renames every linear weight;
passes/clean.py then folds everything but the weights. Only shapes and types are traced, so
parameters may be stand-ins without values.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn

from optimizer.export.interface import Interface, InterfacePort

SIZES = {"batch": 2, "sequence": 3, "past": 5, "total": 8}
"""Sizes of the traced example: all different, none 0 or 1, which torch.export makes constants."""


class Wrapper(nn.Module):
    """Torch model to export, with the interface's inputs and outputs, in order.

    The KV cache is a flat list of tensors, because torch.export accepts no cache object.
    """

    def __init__(self, model: nn.Module, ports: Interface) -> None:
        super().__init__()
        self.model = model
        split = len(ports.inputs) - 2 * ports.layers
        self.inputs = tuple(p.name for p in ports.inputs[:split])
        self.outputs = tuple(p.name for p in ports.outputs[: len(ports.outputs) - 2 * ports.layers])

    def _typed(self, tensor: Tensor) -> Tensor:
        """Cast an input of floats of the model to export, such as an image in float32, to the
        model's float type."""
        own = next(p.dtype for p in self.model.parameters() if p.is_floating_point())
        return tensor.to(own) if tensor.is_floating_point() else tensor

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the model to export; returns the contract's outputs in float32, then the KV cache."""
        arguments: dict[str, Any] = {
            n: self._typed(t) for n, t in zip(self.inputs, tensors, strict=False)
        }
        flat = tensors[len(self.inputs) :]
        if not flat:
            result = self.model(**arguments, return_dict=True)
            return tuple(result[name].float() for name in self.outputs)
        from transformers import DynamicCache

        cache = DynamicCache(list(zip(flat[::2], flat[1::2], strict=True)))
        result = self.model(**arguments, past_key_values=cache, use_cache=True, return_dict=True)
        present = [t for layer in result.past_key_values.layers for t in (layer.keys, layer.values)]
        return (*(result[name].float() for name in self.outputs), *present)


def export(model: nn.Module, ports: Interface, longest: int, opset: int) -> ir.Model:
    """Trace the torch model `model` in its own dtype to a float ONNX graph.

    ports: names and axes of inputs and outputs; axis names become dynamic dimensions
    longest: maximum tokens that the model takes
    """
    dims = {"batch": torch.export.Dim("batch")}
    if any("sequence" in p.axes for p in ports.inputs):
        dims |= {
            "sequence": torch.export.Dim("sequence", max=longest),
            # a separate dimension, because torch.export refuses past + sequence; it derives the
            # minimum from the traced sizes, and the graph has no such limit
            "total": torch.export.Dim("total", min=4),
            "past": torch.export.Dim("past", max=longest),
        }
    shapes = tuple({i: dims[a] for i, a in enumerate(p.axes) if a in dims} for p in ports.inputs)
    with without_exporter_warnings(), torch.no_grad():
        program = torch.onnx.export(
            Wrapper(model, ports).eval(),
            tuple(_example(p) for p in ports.inputs),
            dynamo=True,
            opset_version=opset,
            optimize=False,
            dynamic_shapes=(shapes,),
            input_names=[p.name for p in ports.inputs],
            output_names=[p.name for p in ports.outputs],
            verbose=False,
        )
    assert program is not None
    for value, port in zip(program.model.graph.outputs, ports.outputs, strict=True):
        value.shape = ir.Shape(port.axes)
    return program.model


def _example(port: InterfacePort) -> Tensor:
    size = [SIZES[a] if isinstance(a, str) else a for a in port.axes]
    return torch.ones(size, dtype=getattr(torch, port.dtype))


@contextmanager
def without_exporter_warnings() -> Iterator[None]:
    """Silence three warnings of the exporter: torchvision's operators are not registered, an axis
    name is shared by several inputs, and torch's pytree makes a deprecated call."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"# The axis name: \w+ will not be used", UserWarning)
            warnings.filterwarnings("ignore", r".*LeafSpec.* is deprecated", FutureWarning)
            yield
    finally:
        logger.setLevel(level)
