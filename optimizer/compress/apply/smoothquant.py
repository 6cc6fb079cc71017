"""Apply SmoothQuant to the blocks of a segment: measure, choose each strength, fold or keep.

Where the family lists a pair, the factors fold into the producer and cost nothing at run time.
Elsewhere (in a post-LN block the norm also feeds the residual) the state keeps them as factors
that the input is multiplied by before it is coded, unless the recipe says fold_only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor, nn

from optimizer.compress.methods import smoothquant
from optimizer.compress.methods.activation_ranges import Channels, Histogram, chooser
from optimizer.compress.methods.awq import Shared
from optimizer.compress.methods.rtn import rtn
from optimizer.compress.simulate import code_per_token, code_static, set_parameter
from optimizer.compress.walk import blocks as walk
from optimizer.errors import CheckpointError
from optimizer.load.families import Family, SmoothPair
from optimizer.qtensor import Scheme
from optimizer.recipe.schema import Activations, Quantize
from optimizer.state import Note, Range

SEARCH_ROWS = 1024  # tokens that a strength is judged on, spread evenly over all


@dataclass
class Smoothing:
    """replaced: {parameter: folded float value}; factors: {module: (in,)}; said: {module: what the
    report says}; notes: pairs that could not be folded."""

    replaced: dict[str, Tensor] = field(default_factory=dict)
    factors: dict[str, Tensor] = field(default_factory=dict)
    said: dict[str, str] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)

    def add(self, later: Smoothing) -> None:
        """What was done after this, to the same modules."""
        self.replaced |= later.replaced
        self.factors |= later.factors
        for name, words in later.said.items():
            self.said[name] = "; ".join(filter(None, (self.said.get(name), words)))
        self.notes += later.notes


@dataclass(frozen=True)
class Seen:
    """The consumers' input: its largest magnitudes (in,), and a sample of its rows."""

    absmax: Tensor
    rows: Tensor


def smooth(
    model: nn.Module,
    schemes: Mapping[str, Scheme],
    quantize: Quantize,
    family: Family,
    stream: walk.Stream,
    segment: range,
    blocks: tuple[str, ...],
) -> Smoothing:
    """Fold into the model's weights (float32, in memory) what folds; return all that was done."""
    made = Smoothing()
    pairs = pairs_of(model, schemes, family, blocks, made)
    leader = walk.sharing(model, stream, segment, tuple(schemes))
    if not quantize.fold_only:
        folded = {c for pair in pairs for c in pair.consumers}
        for first in dict.fromkeys(leader.values()):
            group = tuple(n for n in schemes if leader.get(n) == first)
            if not folded.intersection(group):
                pairs.append(SmoothPair("", group))
    seen = _see(model, stream, segment, tuple(schemes), {leader[p.consumers[0]] for p in pairs})
    for pair in pairs:
        _apply(model, pair, schemes, quantize, seen[leader[pair.consumers[0]]], made)
    return made


def pairs_of(
    model: nn.Module,
    schemes: Mapping[str, Scheme],
    family: Family,
    blocks: tuple[str, ...],
    made: Smoothing,
) -> list[SmoothPair]:
    """The family's pairs that exist in these blocks, under the model's own names."""
    pairs = []
    for block in blocks:
        for pair in family.smooth:
            consumers = tuple(f"{block}.{c}" for c in pair.consumers)
            producer = f"{block}.{pair.producer}"
            if not hasattr(model.get_submodule(producer), "weight"):
                why = f"{producer} has no weight to fold into"
            elif not all(c in schemes for c in consumers):
                why = "another consumer of the same input is kept in float"
            else:
                pairs.append(replace(pair, producer=producer, consumers=consumers))
                continue
            made.notes += [
                Note(c, "fallback", f"smoothing not folded: {why}")
                for c in consumers
                if c in schemes
            ]
    return pairs


def _see(
    model: nn.Module,
    stream: walk.Stream,
    segment: range,
    names: tuple[str, ...],
    wanted: set[str],
) -> dict[str, Seen]:
    widths = {n: cast(nn.Linear, model.get_submodule(n)).in_features for n in wanted}
    channels = {n: Channels(width) for n, width in widths.items()}
    samples: dict[str, list[Tensor]] = {n: [] for n in wanted}
    stride = max(1, math.ceil(stream.tokens * len(segment) / SEARCH_ROWS))

    def see(name: str, rows: Tensor, _real: Tensor) -> None:
        if name not in wanted:
            return
        offset = -channels[name].count % stride
        try:
            channels[name].update(rows)
        except ValueError as e:
            raise bad_input(name, e) from e
        samples[name].append(rows[offset::stride].clone())

    walk.run(model, stream, segment, see, names)
    return {n: Seen(channels[n].absmax, torch.cat(samples[n])) for n in wanted}


def bad_input(name: str, error: ValueError) -> CheckpointError:
    """The message for activations that are not finite."""
    return CheckpointError(
        str(error),
        where=f"{name}:input",
        accepted="finite numbers on the calibration data",
        fix="Run the float model on this data: a weight before this module is damaged.",
    )


def _apply(
    model: nn.Module,
    pair: SmoothPair,
    schemes: Mapping[str, Scheme],
    quantize: Quantize,
    seen: Seen,
    made: Smoothing,
) -> None:
    weights = {c: cast(Tensor, model.get_submodule(c).weight) for c in pair.consumers}
    strength, s = _choose(list(weights.values()), schemes[pair.consumers[0]], quantize, seen)
    where = f"folded into {pair.producer}" if pair.producer else "multiplied at run time"
    for name in pair.consumers:
        made.said[name] = (
            "not smoothed: no strength lowers the output error"
            if strength is None
            else f"smoothed with strength {strength:g}, {where}"
        )
    if strength is None:
        return
    if not pair.producer:
        made.factors.update(dict.fromkeys(pair.consumers, 1 / s))
        return
    part, parts = pair.part
    producer = dict(model.get_submodule(pair.producer).named_parameters())
    size = len(producer["weight"]) // parts
    rows = slice(part * size, (part + 1) * size)
    narrow = s
    if pair.grouped and (heads := shared_heads(model, size, len(s))):
        # one factor per value channel: the geometric mean over the query heads that read it
        narrow = heads.of_producer(s.log()).exp()
        s = heads.of_consumer(narrow)
    folded = {
        f"{pair.producer}.{n}": smoothquant.fold_producer(t, narrow, rows)
        for n, t in producer.items()
    }
    folded |= {f"{n}.weight": smoothquant.fold_consumer(w, s) for n, w in weights.items()}
    for name, value in folded.items():
        set_parameter(model, name, value)
        made.replaced[name] = value


def shared_heads(model: nn.Module, values: int, inputs: int) -> Shared | None:
    """How value heads are shared by query heads; None when each query head has its own."""
    if values == inputs:
        return None
    heads = int(model.config.num_attention_heads)  # type: ignore[union-attr, arg-type]
    if inputs % values or inputs % heads:
        raise CheckpointError(
            f"{values} value channels do not serve {inputs} attention outputs evenly",
            where="config.json",
            fix="Report the architecture; until then use methods that fold nothing: rtn, gptq.",
        )
    return Shared(inputs // values, inputs // heads)


def _choose(
    weights: list[Tensor], scheme: Scheme, quantize: Quantize, seen: Seen
) -> tuple[float | None, Tensor]:
    if quantize.strength != "search":
        weight_absmax = torch.stack([w.abs().amax(0) for w in weights]).amax(0)
        strength = float(quantize.strength)
        return strength, smoothquant.factors(seen.absmax, weight_absmax, strength)
    assert quantize.activations is not None
    return smoothquant.search(
        seen.rows,
        seen.absmax,
        weights,
        _activation_code(quantize.activations),
        lambda w: rtn(w, scheme).dequantize(),
    )


def range_chooser(activations: Activations) -> Callable[[Histogram], Range]:
    """The range method of a recipe."""
    return chooser(activations.range, activations.percentile, activations.symmetric)


def _activation_code(activations: Activations) -> smoothquant.Code:
    """Quantize and de-quantize rows as the recipe will, with a range chosen on the rows."""
    if activations.granularity == "token":
        return code_per_token
    choose = range_chooser(activations)

    def code(x: Tensor) -> Tensor:
        histogram = Histogram()
        histogram.update(x)
        return code_static(x, choose(histogram))

    return code
