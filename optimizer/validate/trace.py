"""The torch side of the ledger: run a model and keep what enters and leaves its linear modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from optimizer.validate.distance import Array


@dataclass
class Trace:
    """inputs, outputs: {(module, use): (batch, sequence, width)}; use counts the calls of a shared
    module. result: the model's outputs by name. mask (batch, sequence)."""

    mask: Array
    given: Mapping[str, Array]
    result: dict[str, Array] = field(default_factory=dict)
    inputs: dict[tuple[str, int], Array] = field(default_factory=dict)
    outputs: dict[tuple[str, int], Array] = field(default_factory=dict)


def run(model: nn.Module, batch: Mapping[str, Array], outputs: Collection[str]) -> dict[str, Array]:
    """The model's named outputs, as arrays."""
    tensors = {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in batch.items()}
    with torch.no_grad():
        result = model(**tensors, return_dict=True)
    return {name: result[name].numpy() for name in outputs}


def traced(
    model: nn.Module,
    batch: Mapping[str, Array],
    outputs: Collection[str],
    modules: Collection[str],
) -> Trace:
    """Run and keep the edges of `modules`."""
    trace = Trace(np.asarray(batch["attention_mask"]), dict(batch))
    with _hooks(model, modules, trace):
        trace.result = run(model, batch, outputs)
    return trace


def observe(
    model: nn.Module,
    batch: Mapping[str, Array],
    modules: Collection[str],
    see: Callable[[str, Tensor], None],
) -> None:
    """Run and show `see` the real tokens' inputs (tokens, width) of each of `modules`; nothing is
    kept."""
    real = torch.from_numpy(np.asarray(batch["attention_mask"])).bool()
    handles = []
    for name in modules:

        def look(_m: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
            see(name, args[0][real])

        handles.append(model.get_submodule(name).register_forward_pre_hook(look))
    try:
        run(model, batch, ())
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _hooks(model: nn.Module, modules: Collection[str], trace: Trace) -> Iterator[None]:
    handles = []
    calls: dict[str, int] = {}
    for name in modules:

        def keep(_m: nn.Module, args: tuple[Any, ...], out: Tensor, name: str = name) -> None:
            use = calls[name] = calls.get(name, -1) + 1
            trace.inputs[name, use] = args[0].detach().numpy()
            trace.outputs[name, use] = out.detach().numpy()

        handles.append(model.get_submodule(name).register_forward_hook(keep))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
