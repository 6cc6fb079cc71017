"""Apply AWQ to the blocks of a segment: measure every consumer's input, choose scales, fold them.

Only pairs that model/architectures/families.py lists are scaled, because their factors fold into a
neighbour at no cost at run time; other quantized modules get a note. Without another rounding
method, awq also rounds: to nearest, with each range searched by the output error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from optimizer.compress.apply.activations.folding import (
    Folded,
    explain_bad_input,
    find_foldable_pairs,
    group_shared_heads,
)
from optimizer.compress.apply.weights.rounding import FloatWeight
from optimizer.compress.methods.activations import awq, smoothquant
from optimizer.compress.methods.weights.scale_search import search_output_scales
from optimizer.compress.walk import blocks as walk
from optimizer.compress.walk.blocks import BlockGroup
from optimizer.foundation.qtensor import QTensor, absmax_scale, quantize
from optimizer.model.architectures.linear_blocks import SmoothPair
from optimizer.recipe.compression.quantize import Quantize


class _InputSums:
    """Running sums over the calibration tokens for one input that modules share: H = x^T x (in, in)
    and mean|x| (in,)."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.hessian = torch.zeros(width, width, dtype=torch.float64, device=device)
        self._magnitude = torch.zeros(width, dtype=torch.float64, device=device)
        self._tokens = 0

    def update(self, rows: Tensor) -> None:
        self.hessian += rows.T @ rows
        self._magnitude += rows.abs().double().sum(0)
        self._tokens += len(rows)

    def merge(self, later: _InputSums) -> None:
        self.hessian += later.hessian
        self._magnitude += later._magnitude
        self._tokens += later._tokens

    @property
    def magnitude(self) -> Tensor:
        return (self._magnitude / max(self._tokens, 1)).float()


def scale(group: BlockGroup, _quantize: Quantize) -> Folded:
    """Fold AWQ's scales into the model's weights (float32, in memory); returns replaced parameters
    and notes."""
    folded = Folded()
    pairs = find_foldable_pairs(group, folded)
    leader = walk.find_sharing(group, tuple(group.schemes))
    leaders = dict.fromkeys(leader[p.consumers[0]] for p in pairs)

    def start() -> dict[str, _InputSums]:
        device = group.stream.device
        return {name: _InputSums(group.linear(name).in_features, device) for name in leaders}

    def measure(sums: Mapping[str, _InputSums], part: range) -> None:
        walk.observe(group, lambda name, rows, _real: sums[name].update(rows), sums, part)

    sums = group.stream.deal.sum(start, measure)
    for pair in pairs:
        _fold(group, pair, sums[leader[pair.consumers[0]]], folded)
    covered = {c for p in pairs for c in p.consumers}
    for name in group.schemes:
        if name not in covered:
            folded.remarks[name] = "not scaled: no neighbour to fold into"
    return folded


def _fold(group: BlockGroup, pair: SmoothPair, sums: _InputSums, folded: Folded) -> None:
    model = group.model
    weights = [cast(Tensor, model.get_submodule(c).weight) for c in pair.consumers]
    scheme = group.schemes[pair.consumers[0]]
    producer = dict(model.get_submodule(pair.producer).named_parameters())
    part, parts = pair.part
    size = len(producer["weight"]) // parts
    shared = group_shared_heads(model, size, weights[0].shape[1]) if pair.grouped else None

    def fake_quantize(w: Tensor, _importance: Tensor) -> Tensor:
        return quantize(w, *absmax_scale(w, scheme), scheme).dequantize()

    try:
        choice = awq.search(
            weights, sums.hessian.float(), sums.magnitude, fake_quantize, shared=shared
        )
    except ValueError as e:
        raise explain_bad_input(pair.consumers[0], e) from e
    remark = "not scaled: no scale lowers the output error"
    if choice.alpha is not None:
        scaling = " by weight" if choice.by_weight else ""
        remark = f"awq ratio {choice.alpha:g}{scaling}, folded into {pair.producer}"
        rows = slice(part * size, (part + 1) * size)
        s = choice.s if shared is None else shared.of_producer(choice.s)
        for n, t in producer.items():
            folded.replace(model, f"{pair.producer}.{n}", smoothquant.fold_producer(t, s, rows))
        for name, w in zip(pair.consumers, weights, strict=True):
            folded.replace(model, f"{name}.weight", smoothquant.fold_consumer(w, choice.s))
    folded.remarks |= dict.fromkeys(pair.consumers, remark)


def round_weight(weight: FloatWeight, _quantize: Quantize) -> tuple[QTensor, str]:
    """Round a weight to nearest as AWQ does, each range searched by the output error; returns
    (integers, note)."""
    assert weight.second_moments is not None
    q = search_output_scales(weight.kept, weight.second_moments, weight.scheme)
    return q, "ranges by output error"
