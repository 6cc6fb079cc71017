"""Apply cross-layer equalization to an ONNX file: view its tensors with equalized channels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from optimizer.compress.apply.activations.rotation import ChangedTensors
from optimizer.compress.methods.activations.equalization import (
    divide_outputs,
    find_factors,
    multiply_inputs,
)
from optimizer.compress.walk.model_source import ModelSource
from optimizer.model.graph.record import BODY
from optimizer.recipe.compression.quantize import Quantize


@dataclass(frozen=True)
class Equalized(Mapping[str, Tensor]):
    """View of a checkpoint in which each tensor is equalized when it is read.

    outputs: {parameter: s by which its outputs are divided}
    inputs: {weight: (s by which its inputs are multiplied, groups of its channels)}
    """

    tensors: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    inputs: Mapping[str, tuple[Tensor, int]]

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        if name not in self.outputs and name not in self.inputs:
            return tensor
        wide = tensor.double()
        if name in self.outputs:
            wide = divide_outputs(wide, self.outputs[name])
        if name in self.inputs:
            wide = multiply_inputs(wide, *self.inputs[name])
        return wide.float()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def equalize(source: ModelSource, _quantize: Quantize) -> ModelSource:
    """Return the source with equalized tensors; `replaced` has those that differ."""
    pairs = [
        (f"{BODY}.{pair.producer}", [f"{BODY}.{reader}" for reader in pair.consumers])
        for pair in source.family.equalized
    ]
    names = dict.fromkeys(name for first, readers in pairs for name in (first, *readers))
    modules: dict[str, Any] = {name: source.model.get_submodule(name) for name in names}
    groups = {name: getattr(module, "groups", 1) for name, module in modules.items()}
    weights = {name: source.tensors[f"{name}.weight"] for name in names}
    factors = find_factors(pairs, weights, groups)
    outputs = {
        f"{first}.{part}": s
        for first, s in factors.items()
        for part, _ in modules[first].named_parameters()
    }
    inputs = {
        f"{reader}.weight": (factors[first], groups[reader])
        for first, readers in pairs
        for reader in readers
    }
    tensors = Equalized(source.tensors, outputs, inputs)
    changed = ChangedTensors(tensors, list(dict.fromkeys([*outputs, *inputs])))
    return replace(source, tensors=tensors, replaced=changed)
