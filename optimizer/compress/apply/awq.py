"""Apply AWQ to the blocks of a segment: measure every consumer's input, choose scales, fold them.

Only pairs that load/families.py lists are scaled, because there the factors fold into a neighbour
and nothing is added at run time; what else is quantized is left as it is, and noted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from optimizer.compress.apply.smoothquant import Smoothing, bad_input, pairs_of, shared_heads
from optimizer.compress.methods import awq, smoothquant
from optimizer.compress.simulate import set_parameter
from optimizer.compress.walk import blocks as walk
from optimizer.load.families import Family, SmoothPair
from optimizer.qtensor import Scheme, absmax_scale, quantize


class _Seen:
    """Running sums of one input: x^T x (in, in) and mean|x| (in,)."""

    def __init__(self, width: int) -> None:
        self.hessian = torch.zeros(width, width, dtype=torch.float64)
        self._magnitude = torch.zeros(width, dtype=torch.float64)
        self._tokens = 0

    def update(self, rows: Tensor) -> None:
        self.hessian += rows.T @ rows
        self._magnitude += rows.abs().double().sum(0)
        self._tokens += len(rows)

    @property
    def magnitude(self) -> Tensor:
        return (self._magnitude / max(self._tokens, 1)).float()


def scale(
    model: nn.Module,
    schemes: Mapping[str, Scheme],
    family: Family,
    stream: walk.Stream,
    segment: range,
    blocks: tuple[str, ...],
) -> Smoothing:
    """Fold into the model's weights (float32, in memory); returns what was replaced and said."""
    made = Smoothing()
    pairs = pairs_of(model, schemes, family, blocks, made)
    leader = walk.sharing(model, stream, segment, tuple(schemes))
    wanted = {leader[p.consumers[0]] for p in pairs}
    seen = {n: _Seen(cast(nn.Linear, model.get_submodule(n)).in_features) for n in wanted}

    def see(name: str, rows: Tensor, _real: Tensor) -> None:
        if name in seen:
            seen[name].update(rows)

    walk.run(model, stream, segment, see, tuple(schemes))
    for pair in pairs:
        _apply(model, pair, schemes, seen[leader[pair.consumers[0]]], made)
    covered = {c for p in pairs for c in p.consumers}
    for name in schemes:
        if name not in covered:
            made.said[name] = "not scaled: no neighbour to fold into"
    return made


def _apply(
    model: nn.Module,
    pair: SmoothPair,
    schemes: Mapping[str, Scheme],
    seen: _Seen,
    made: Smoothing,
) -> None:
    weights = [cast(Tensor, model.get_submodule(c).weight) for c in pair.consumers]
    scheme = schemes[pair.consumers[0]]
    producer = dict(model.get_submodule(pair.producer).named_parameters())
    part, parts = pair.part
    size = len(producer["weight"]) // parts
    shared = shared_heads(model, size, weights[0].shape[1]) if pair.grouped else None

    def code(w: Tensor, _importance: Tensor) -> Tensor:
        return quantize(w, *absmax_scale(w, scheme), scheme).dequantize()

    try:
        choice = awq.search(weights, seen.hessian.float(), seen.magnitude, code, shared=shared)
    except ValueError as e:
        raise bad_input(pair.consumers[0], e) from e
    said = "not scaled: no scale lowers the output error"
    if choice.ratio is not None:
        form = " by weight" if choice.by_weight else ""
        said = f"awq ratio {choice.ratio:g}{form}, folded into {pair.producer}"
        rows = slice(part * size, (part + 1) * size)
        s = choice.s if shared is None else shared.of_producer(choice.s)
        for n, t in producer.items():
            _replace(model, f"{pair.producer}.{n}", smoothquant.fold_producer(t, s, rows), made)
        for name, w in zip(pair.consumers, weights, strict=True):
            _replace(model, f"{name}.weight", smoothquant.fold_consumer(w, choice.s), made)
    made.said |= dict.fromkeys(pair.consumers, said)


def _replace(model: nn.Module, name: str, value: Tensor, made: Smoothing) -> None:
    set_parameter(model, name, value)
    made.replaced[name] = value
