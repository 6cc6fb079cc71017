"""Compressed states made without the compress stage, for graphs exported from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from optimizer.foundation.qtensor import QTensor, Scheme, absmax_scale, quantize
from optimizer.foundation.state import Activations, CompressedState, Range
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model
from tests.export.folders import Exported

PER_CHANNEL = Scheme(8)
SCHEMES = {
    "int8 channel": PER_CHANNEL,
    "int8 tensor": Scheme(8, granularity="tensor"),
    "int8 group 32": Scheme(8, granularity="group", group_size=32),
    "int4 group 32": Scheme(4, granularity="group", group_size=32),
    "int4 group 16": Scheme(4, granularity="group", group_size=16),
    "int8 channel asymmetric": Scheme(8, symmetric=False),
    "int4 group 32 asymmetric": Scheme(4, symmetric=False, granularity="group", group_size=32),
}


def rounded(weight: Tensor, scheme: Scheme) -> QTensor:
    return quantize(weight, *absmax_scale(weight, scheme), scheme)


def seen(model: nn.Module, inputs: Mapping[str, Tensor], modules: list[str]) -> dict[str, Tensor]:
    """The input of each module on `inputs`."""
    found: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        return lambda _module, given: found.setdefault(name, given[0].detach())

    handles = [model.get_submodule(m).register_forward_pre_hook(hook(m)) for m in modules]
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return found


def state_of(
    made: Exported,
    scheme: Scheme,
    activations: Activations = None,
    *,
    symmetric: bool = False,
    factored: str = "",
) -> CompressedState:
    """Every linear module rounded to nearest; ranges from what random tokens give.

    factored: modules whose name ends so get a factor, folded into their integers.
    """
    checkpoint = open_checkpoint(made.source)
    model = load_torch_model(checkpoint, "sentence-embedding")
    inputs = {
        "input_ids": torch.arange(1, 65).reshape(4, 16),
        "attention_mask": torch.ones(4, 16, dtype=torch.int64),
    }
    values = seen(model, inputs, list(made.names.modules))
    weights, ranges, factors = {}, {}, {}
    for name, module in made.names.modules.items():
        weight, x = model.get_parameter(module.parameter).detach(), values[name]
        if factored and name.endswith(factored):
            factor = torch.linspace(0.5, 2, weight.shape[1])
            factors[module.site] = factor
            weight, x = weight / factor, x * factor
        weights[module.parameter] = rounded(weight, scheme)
        low, high = min(float(x.min()), 0), max(float(x.max()), 0)
        ranges[module.site] = Range.symmetric(max(-low, high)) if symmetric else Range(low, high)
    return CompressedState(
        weights,
        ranges=ranges if activations == "tensor" else {},
        factors=factors,
        activations=activations,
    )
