"""Find the first node of a graph at which drawn rows go wrong, for messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from optimizer.foundation.rounding.tolerance import UNIT, lengths
from optimizer.load.onnx_model.ports import ROWS
from optimizer.model.graph.module import GraphModel
from optimizer.model.graph.record import BODY, Node

Inputs = Mapping[str, Tensor]
Results = Sequence[Tensor]
HALF = UNIT["fp32"] ** 0.5
"""Relative distance at which half of the digits of float32 differ: more than rounding moves."""


def undefined(model: GraphModel, inputs: Inputs) -> Node | None:
    """Find in a loaded ONNX file the first node that makes NaN or infinity of finite values. model:
    filled"""

    def is_wrong(_: Node, arguments: Results, results: Results) -> bool:
        finite = all(torch.isfinite(a).all() for a in arguments if a is not None)
        return finite and not all(torch.isfinite(r).all() for r in results)

    return _first(model, inputs, is_wrong)


def mixing(model: GraphModel, inputs: Inputs) -> Node | None:
    """Find in a loaded ONNX file the first node whose result for ROWS rows is not that for each row
    alone. model: filled"""
    alone: dict[str, list[Tensor]] = {}

    def keep(node: Node, _: Results, results: Results) -> bool:
        for name, result in zip(node.outputs, results, strict=False):
            alone.setdefault(name, []).append(result)
        return False

    def is_wrong(node: Node, _: Results, results: Results) -> bool:
        pairs = zip(node.outputs, results, strict=False)
        return any(_apart(whole, alone.get(name, [])) > HALF for name, whole in pairs)

    for i in range(ROWS):
        _first(model, {name: rows[i : i + 1] for name, rows in inputs.items()}, keep)
    return _first(model, inputs, is_wrong)


def _apart(whole: Tensor, rows: Sequence[Tensor]) -> float:
    """Measure the largest relative L2 of a row of `whole`, whatever its axis of rows, from `rows`,
    to check a loaded ONNX file; infinity for other shapes, 0 for whole numbers and for what does
    not grow with the rows."""
    if len(rows) < ROWS or not whole.is_floating_point():
        return 0.0
    grown = [i for i, n in enumerate(whole.shape) if n != rows[0].shape[i]]
    if whole.ndim != rows[0].ndim or len(grown) > 1:
        return torch.inf
    if not grown:
        return 0.0
    joined = torch.cat(list(rows), grown[0])
    if joined.shape != whole.shape:
        return torch.inf
    each = zip(whole.chunk(ROWS, grown[0]), joined.chunk(ROWS, grown[0]), strict=True)
    return max(lengths([(a.flatten().numpy(), b.flatten().numpy()) for a, b in each]))


def _first(
    model: GraphModel, inputs: Inputs, is_wrong: Callable[[Node, Any, Results], bool]
) -> Node | None:
    """Run a loaded ONNX file's model on `inputs`; return the first node for which `is_wrong` holds,
    or None."""
    body: Any = model.get_submodule(BODY)
    first: list[Node] = []

    def look(node: Node, arguments: list[Any], results: tuple[Tensor, ...]) -> None:
        if not first and is_wrong(node, arguments, results):
            first.append(node)

    body.observe = look
    with torch.no_grad():
        model(**inputs)
    body.observe = None
    return next(iter(first), None)
