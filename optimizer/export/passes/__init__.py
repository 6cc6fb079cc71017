"""Passes over the exported graph, one per file, and the runner that checks the contract of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import onnx_ir as ir

from optimizer.foundation.errors import OptimizeError


def always(_: ir.Model) -> bool:
    """Return True: the condition of an export pass that accepts every graph."""
    return True


class Pass(NamedTuple):
    """One change of the exported graph, made in place by `apply`.
    requires: test of the graph before it
    ensures: test of the graph after it
    """

    name: str
    apply: Callable[[ir.Model], None]
    requires: Callable[[ir.Model], bool] = always
    ensures: Callable[[ir.Model], bool] = always


def run(model: ir.Model, passes: Iterable[Pass]) -> None:
    """Apply the passes to the exported graph in order. Raises OptimizeError for a pass whose
    contract is broken."""
    for step in passes:
        if not step.requires(model):
            raise OptimizeError(f"the graph is not what pass {step.name!r} needs", where="export")
        step.apply(model)
        if not step.ensures(model):
            raise OptimizeError(f"pass {step.name!r} left its work undone", where="export")
