"""Apply SmoothQuant to the blocks of a segment: measure inputs, choose each strength, fold the
factors.

Factors of pairs that the family lists fold into the producer at no cost at run time. Others (in a
post-LN block the norm also feeds the residual) become factors of the state, multiplied at run time,
unless the recipe's fold_only matches the modules.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import cast

import torch
from torch import Tensor

from optimizer.compress.apply.activations.activation_ranges import make_range_chooser
from optimizer.compress.apply.activations.folding import (
    Folded,
    explain_bad_input,
    find_foldable_pairs,
    group_shared_heads,
)
from optimizer.compress.methods.activations import smoothquant
from optimizer.compress.methods.activations.activation_ranges import Channels, MagnitudeHistogram
from optimizer.compress.methods.weights.rtn import rtn
from optimizer.compress.simulate import fake_quantize, fake_quantize_per_token
from optimizer.compress.walk import blocks as walk
from optimizer.compress.walk.blocks import BlockGroup
from optimizer.foundation.qtensor import Scheme
from optimizer.model.architectures.linear_blocks import SmoothPair
from optimizer.recipe.compression.quantize import Activations, Quantize

SEARCH_ROWS = 1024  # tokens for the search of a strength, spread evenly over all


@dataclass(frozen=True)
class InputSample:
    """Sample of the input of a segment's consumers for SmoothQuant: largest magnitudes (in,), and
    rows (tokens, in)."""

    absmax: Tensor
    rows: Tensor


def smooth(group: BlockGroup, quantize: Quantize) -> Folded:
    """Smooth the inputs of a segment by SmoothQuant: returns the weights into which factors were
    folded (set in the model too) and the factors left for run time."""
    folded = Folded()
    pairs = find_foldable_pairs(group, folded)
    leader = walk.find_sharing(group, tuple(group.schemes))
    consumers = {c for pair in pairs for c in pair.consumers}
    for first in dict.fromkeys(leader.values()):
        readers = tuple(n for n in group.schemes if leader.get(n) == first)
        if consumers.intersection(readers):
            continue
        if any(_folds_only(quantize, name) for name in readers):
            folded.remarks.update(dict.fromkeys(readers, "not smoothed: fold_only"))
        else:
            pairs.append(SmoothPair("", readers))
    samples = _samples(group, {leader[p.consumers[0]] for p in pairs})
    for pair in pairs:
        _apply(group, pair, samples[leader[pair.consumers[0]]], quantize, folded)
    return folded


def _folds_only(quantize: Quantize, module: str) -> bool:
    """Return True where SmoothQuant may only fold factors into weights: the recipe (fold_only)
    forbids to multiply the module's input at run time."""
    if isinstance(quantize.fold_only, bool):
        return quantize.fold_only
    return any(fnmatchcase(module, pattern) for pattern in quantize.fold_only)


def _samples(group: BlockGroup, names: Collection[str]) -> dict[str, InputSample]:
    device, deal = group.stream.device, group.stream.deal
    samples: dict[str, list[Tensor]] = {n: [] for n in names}
    stride = max(1, math.ceil(group.stream.tokens * len(group.segment) / SEARCH_ROWS))

    def start() -> dict[str, Channels]:
        return {n: Channels(group.linear(n).in_features, device) for n in sorted(names)}

    def measure(channels: Mapping[str, Channels], part: range) -> None:
        def hook(name: str, rows: Tensor, _real: Tensor) -> None:
            offset = -channels[name].count % stride
            try:
                channels[name].update(rows)
            except ValueError as e:
                raise explain_bad_input(name, e) from e
            samples[name].append(rows[offset::stride].clone())

        walk.observe(group, hook, names, part)

    channels = deal.sum(start, measure)
    of_all = deal.processes.gather({n: torch.cat(samples[n]).cpu() for n in names})
    rows = {n: torch.cat([own[n] for own in of_all]).to(device) for n in names}
    return {n: InputSample(channels[n].absmax, rows[n]) for n in names}


def _apply(
    group: BlockGroup, pair: SmoothPair, sample: InputSample, quantize: Quantize, folded: Folded
) -> None:
    model = group.model
    weights = {c: cast(Tensor, model.get_submodule(c).weight) for c in pair.consumers}
    scheme = group.schemes[pair.consumers[0]]
    strength, s = _choose(list(weights.values()), scheme, quantize, sample)
    where = f"folded into {pair.producer}" if pair.producer else "multiplied at run time"
    for name in pair.consumers:
        folded.remarks[name] = (
            "not smoothed: no strength lowers the output error"
            if strength is None
            else f"smoothed with strength {strength:g}, {where}"
        )
    if strength is None:
        return
    if not pair.producer:
        folded.factors.update(dict.fromkeys(pair.consumers, 1 / s))
        return
    part, parts = pair.part
    producer = dict(model.get_submodule(pair.producer).named_parameters())
    size = len(producer["weight"]) // parts
    rows = slice(part * size, (part + 1) * size)
    narrow = s
    if pair.grouped and (heads := group_shared_heads(model, size, len(s))):
        # one factor per value channel: the geometric mean over the query heads that read it
        narrow = heads.of_producer(s.log()).exp()
        s = heads.of_consumer(narrow)
    values = {
        f"{pair.producer}.{n}": smoothquant.fold_producer(t, narrow, rows)
        for n, t in producer.items()
    }
    values |= {f"{n}.weight": smoothquant.fold_consumer(w, s) for n, w in weights.items()}
    for name, value in values.items():
        folded.replace(model, name, value)


def _choose(
    weights: list[Tensor], scheme: Scheme, quantize: Quantize, sample: InputSample
) -> tuple[float | None, Tensor]:
    if quantize.strength != "search":
        weight_absmax = torch.stack([w.abs().amax(0) for w in weights]).amax(0)
        strength = float(quantize.strength)
        return strength, smoothquant.compute_factors(sample.absmax, weight_absmax, strength)
    assert quantize.activations is not None
    return smoothquant.search(
        sample.rows,
        sample.absmax,
        weights,
        _activation_quantizer(quantize.activations),
        lambda w: rtn(w, scheme).dequantize(),
    )


def _activation_quantizer(activations: Activations) -> smoothquant.Quantizer:
    """Return a function that fake-quantizes an input x as the recipe says, with a static range
    chosen on x itself, by which SmoothQuant judges a strength."""
    if activations.granularity == "token":
        return fake_quantize_per_token
    choose = make_range_chooser(activations)

    def quantize_rows(x: Tensor) -> Tensor:
        histogram = MagnitudeHistogram()
        histogram.update(x)
        return fake_quantize(x, choose(histogram))

    return quantize_rows
