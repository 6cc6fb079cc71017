"""Predict from the checkpoint's headers which weights compress stores as integers."""

from __future__ import annotations

from math import prod

from optimizer.compress.selection import matches
from optimizer.foundation.state import owner_of, weight_name
from optimizer.model.architectures.family_record import BLOCK
from optimizer.model.graph.needs import GraphShapes
from optimizer.recipe.compression.quantize import Weights
from optimizer.recipe.schema import Compression
from optimizer.store import CompressedShapes, Shapes

HEAD = "head"  # a part of the name of every decoder's output head


def predict_shapes(section: Compression, model: Shapes) -> Shapes:
    """Return the shapes of `model` with the weights that will be integers: matrices in blocks, and
    a decoder's embedding and head as the recipe says."""
    quantize = section.quantize
    if quantize.leaves_float:
        return model
    integers: dict[str, tuple[tuple[int, ...], float]] = {}
    if isinstance(model, GraphShapes):
        for module in model.modules:
            if not matches(module, quantize.keep_float):
                shape = model[weight_name(module)]
                rules = (r.weights for r in quantize.layers if matches(module, r.modules))
                width = _width(next(rules, quantize.weights), (shape[0], prod(shape[1:])))
                integers[weight_name(module)] = shape, width
        return CompressedShapes(model, integers)
    for name, shape in model.items():
        module = owner_of(name)
        if len(shape) < 2 or matches(module, quantize.keep_float):
            continue
        if BLOCK.search(name):
            rules = (r.weights for r in quantize.layers if matches(module, r.modules))
            integers[name] = (shape, _width(next(rules, quantize.weights), shape))
    outside = {n: s for n, s in model.items() if len(s) == 2 and not BLOCK.search(n)}
    rows = max((s[0] for s in outside.values()), default=0)
    tables = {n: s for n, s in outside.items() if s[0] == rows}
    for name, shape in tables.items():
        weights = quantize.head if HEAD in name else quantize.embedding
        if isinstance(weights, Weights):
            integers[name] = (shape, _width(weights, shape))
    tied = next(iter(tables.values())) if len(tables) == 1 else None
    if tied is not None and isinstance(quantize.head, Weights):
        integers[HEAD] = (tied, _width(quantize.head, tied))
    return CompressedShapes(model, integers)


def _width(weights: Weights, shape: tuple[int, ...]) -> float:
    """Predict the bytes per value of a compressed weight, with its share of float32 scales."""
    bits = 8 if weights.bits == 8 else 4
    if weights.granularity in ("tensor", "block"):
        return bits / 8
    return bits / 8 + 4 / (weights.group_size or shape[-1])
