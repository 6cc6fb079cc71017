"""Models of a run, changed by one of the adapters that stay apart from the compressed model.

    y = module(x) + (x A) B            for every linear module that the adapter changes

The float model and the de-quantized state are changed alike, in torch; the lowered graph reads the
same matrices as inputs (target_runner.py). Models are compared end to end; their modules are
proven without adapters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from optimizer.compress.simulate import set_module
from optimizer.harness.contract import adapter_file
from optimizer.harness.runtimes.ort.adapters import A, B, read
from optimizer.recipe.validate import Depth
from optimizer.validate.ledger.distance import Array
from optimizer.validate.ledger.limits.monte_carlo import copy_modules
from optimizer.validate.materials import Materials

BASE = ".base_layer"


class AdaptedLinear(nn.Module):
    """A linear module with an adapter, in the models that validate compares: y = base_layer(x) + x
    first second.

    base_layer: the unchanged linear module
    first: matrix (in, rank)
    second: matrix (rank, out)
    """

    def __init__(self, base_layer: nn.Module, first: Array, second: Array) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.first = nn.Parameter(torch.from_numpy(first), requires_grad=False)
        self.second = nn.Parameter(torch.from_numpy(second), requires_grad=False)

    @property
    def weight(self) -> Any:
        """Weight of the adapted module without its adapter, for models that read it directly."""
        return self.base_layer.weight

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base_layer(x) + x @ self.first @ self.second
        return result


def adapt(model: nn.Module, matrices: Mapping[str, Array]) -> nn.Module:
    """Apply an adapter to the ledger's reference: return a copy of `model` whose linear modules add
    an adapter's output. The copy shares the parameters of `model`, which is unchanged.

    matrices: {module name + A or B: matrix}, (in, rank) and (rank, out)
    """
    own = copy_modules(model)
    for name in list_changed(matrices):
        module = own.get_submodule(name)
        set_module(own, name, AdaptedLinear(module, matrices[f"{name}{A}"], matrices[f"{name}{B}"]))
    return own


def list_changed(matrices: Mapping[str, Array]) -> list[str]:
    """List for the ledger the names of the modules that an adapter changes, from the names of its
    matrices."""
    return [name.removesuffix(A) for name in matrices if name.endswith(A)]


@dataclass
class AdaptedMaterials(Materials):
    """Models and traces of a run in which one adapter changes the float and the compressed model.

    plain: materials of the run without adapters, whose models are shared
    adapter: name of the adapter
    """

    plain: Materials = field(kw_only=True)
    adapter: str = field(kw_only=True)

    @cached_property
    def matrices(self) -> dict[str, Array]:
        return read(self.source / adapter_file(self.adapter))

    @cached_property
    def float_model(self) -> nn.Module:
        return adapt(self.plain.float_model, self.matrices)

    @cached_property
    def folded_model(self) -> nn.Module:
        return self.float_model

    @cached_property
    def simulated_model(self) -> nn.Module:
        return adapt(self.plain.simulated_model, self.matrices)

    @cached_property
    def answering_model(self) -> nn.Module:
        return self.float_model

    @cached_property
    def parameters(self) -> dict[str, Tensor]:
        return self.plain.parameters

    @cached_property
    def depth(self) -> Depth:
        return "end_to_end"

    @property
    def compares_outputs(self) -> bool:
        return False

    @property
    def modules(self) -> list[str]:
        return [self._placed(name) for name in self.plain.modules]

    @cached_property
    def kernel_blocks(self) -> dict[str, int]:
        return {self._placed(n): block for n, block in self.plain.kernel_blocks.items()}

    @cached_property
    def offset_biases(self) -> dict[str, Tensor]:
        return {self._placed(n): bias for n, bias in self.plain.offset_biases.items()}

    def _placed(self, name: str) -> str:
        """Return the name that a linear module of the base model has in the models with the
        adapter."""
        return f"{name}{BASE}" if f"{name}{A}" in self.matrices else name
