"""A float ONNX graph from a torch model, traced by torch.onnx.export(dynamo=True).

The graph keeps the parameters' own names: it is exported unoptimized, and `clean` then folds
everything but the weights (the exporter's own optimization renames every linear weight).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn

WRAPPED = "model"
"""The attribute the model sits under while it is traced; clean.py strips it from names."""


class _Contract(nn.Module):
    """Takes the contract's inputs, in order, and returns its outputs in float32."""

    def __init__(self, model: nn.Module, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        result = self.model(**dict(zip(self.inputs, tensors, strict=True)), return_dict=True)
        return tuple(result[name].float() for name in self.outputs)


def export(
    model: nn.Module, contract: Mapping[str, Any], examples: Mapping[str, Tensor], opset: int
) -> ir.Model:
    """Trace `model`, in whatever dtype it is, to an unoptimized graph.

    contract: the I/O contract; its axis names become the graph's dynamic dimensions.
    examples: one int64 tensor per input, all of one shape (batch, sequence), both at least 2;
    distinct objects (torch.export makes one input of two that are the same tensor).
    The outputs are float32 whatever the dtype of the model.
    """
    names = [i["name"] for i in contract["inputs"]]
    outputs = [o["name"] for o in contract["outputs"]]
    if len({id(examples[n]) for n in names}) != len(names):
        raise ValueError("examples: the same tensor given for two inputs would merge them")
    longest = contract["tokenizer"]["max_length"]
    dims = {
        "batch": torch.export.Dim("batch"),
        "sequence": torch.export.Dim("sequence", max=longest),
    }
    shapes = tuple({i: dims[a] for i, a in enumerate(e["axes"])} for e in contract["inputs"])
    with quiet(), torch.no_grad():
        program = torch.onnx.export(
            _Contract(model, names, outputs).eval(),
            tuple(examples[n] for n in names),
            dynamo=True,
            opset_version=opset,
            optimize=False,
            dynamic_shapes=(shapes,),
            input_names=names,
            output_names=outputs,
            verbose=False,
        )
    assert program is not None
    return program.model


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
