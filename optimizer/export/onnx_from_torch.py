"""A float ONNX graph from a torch model, traced by torch.onnx.export(dynamo=True).

The graph keeps the parameters' own names: it is exported unoptimized, and `clean` then folds
everything but the weights (the exporter's own optimization renames every linear weight). Nothing
but shapes and types is traced, so the parameters may be stand-ins without values.
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

from optimizer.export.interface import Interface, Port

SIZES = {"batch": 2, "sequence": 3, "past": 5, "total": 8}
"""Of the traced examples: all different, none 0 or 1, which torch.export takes for constants."""


class Wrapper(nn.Module):
    """Takes the interface's inputs, in order, and returns its outputs, in order.

    The cache comes and goes as a flat list of tensors: torch.export takes no cache object, so
    one is made inside.
    """

    def __init__(self, model: nn.Module, ports: Interface) -> None:
        super().__init__()
        self.model = model
        split = len(ports.inputs) - 2 * ports.layers
        self.inputs = tuple(p.name for p in ports.inputs[:split])
        self.outputs = tuple(p.name for p in ports.outputs[: len(ports.outputs) - 2 * ports.layers])

    def _typed(self, tensor: Tensor) -> Tensor:
        """Numbers in the model's own type: those of an image are float32 outside."""
        own = next(p.dtype for p in self.model.parameters() if p.is_floating_point())
        return tensor.to(own) if tensor.is_floating_point() else tensor

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
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
    """Trace `model`, in whatever dtype it is, to an unoptimized graph.

    ports: its axis names become the graph's dynamic dimensions. longest: the most tokens the
    model takes. Inputs and outputs get the names and axes of `ports`.
    """
    dims = {"batch": torch.export.Dim("batch")}
    if any("sequence" in p.axes for p in ports.inputs):
        dims |= {
            "sequence": torch.export.Dim("sequence", max=longest),
            # a dimension of its own: torch.export refuses past + sequence; the minimum is what it
            # derives from the traced sizes, and the graph itself has no such limit
            "total": torch.export.Dim("total", min=4),
            "past": torch.export.Dim("past", max=longest),
        }
    shapes = tuple({i: dims[a] for i, a in enumerate(p.axes) if a in dims} for p in ports.inputs)
    with quiet(), torch.no_grad():
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


def _example(port: Port) -> Tensor:
    size = [SIZES[a] if isinstance(a, str) else a for a in port.axes]
    return torch.ones(size, dtype=getattr(torch, port.dtype))


@contextmanager
def quiet() -> Iterator[None]:
    """Hold back what the exporter says about itself; everything else still warns.

    - torchvision's operators are not registered (torchvision is not wanted here);
    - an axis name is shared by several inputs (that is what names are for);
    - a deprecated call inside torch's own pytree.
    """
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
