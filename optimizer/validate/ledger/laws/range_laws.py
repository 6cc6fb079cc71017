"""A static range lies no further from the one that the same method chooses on the inputs of the
finished model than ranges of the float model do: quantization moves what a module reads by some
part of that. "Further" is by the ends; of a method that searches the least of some loss, by that
loss, which may be flat.

The limit is measured in the run: the upper tolerance bound of how far the ranges of float inputs
lie from those of quantized ones, over all tensors that modules read. Extremes may besides be
too narrow. smoothquant chooses factors by which the extremes of channels on these very texts become
alike, or equal: any other input, that of the float model as well as that of the finished one, goes
beyond the range in whichever channels grow, so that these two may agree where neither does with the
state. What the range was measured on lies no further from the float model's input than the finished
model's does, so an extreme may go beyond by twice as far as it moves between these two (the
triangle inequality). Which channel moves is chance: the k-th furthest beyond is held against twice
the k-th furthest movement, so that a range too narrow for many channels is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from optimizer.compress.methods.activations.activation_ranges import (
    Histogram,
    chooser,
    clip_range,
    excess_loss,
    is_searched,
    minmax,
    neighbours,
)
from optimizer.foundation.rounding.tolerance import normal_bound
from optimizer.foundation.state import CompressedState, Range, input_name, owner_of
from optimizer.model.architectures.operands import attention_of, is_probabilities
from optimizer.recipe.schema import Activations
from optimizer.validate.ledger.breach import breach
from optimizer.validate.ledger.laws.calibration_laws import (
    COMMON,
    FINISHED,
    FLOAT,
    Findings,
    SharedInputs,
    integer_ends,
)


class RangeLaw:
    """Of what modules read, or (operands) of what attentions multiply but probabilities."""

    def __init__(
        self, state: CompressedState, method: Activations | None, *, operands: bool = False
    ) -> None:
        static = method is not None and state.activations == "tensor"
        self.modules = tuple(
            name
            for name in map(owner_of, state.ranges if static else ())
            if bool(attention_of(name)) == operands and not is_probabilities(name)
        )
        self._state = state
        if method is not None:
            self._measures = _measures(method)
            self._choose = chooser(method.range, method.percentile, method.symmetric)
            self._only_ends = method.range == "minmax"
        self._readers = SharedInputs(state, self.modules)
        self._seen = [{m: Histogram() for m in self.modules} for _ in range(3)]
        self._channels = [_ChannelEnds() for _ in range(3)]

    def see(self, kinds: Sequence[int], module: str, rows: Tensor) -> None:
        if not self._readers.collects(module, rows):
            return
        factor = self._readers.factors[module]
        if factor is not None:
            rows = rows * factor
        for kind in kinds:
            histogram = self._seen[kind][module]
            see = histogram.extend if self._only_ends else histogram.update
            see(rows)
            if self._only_ends and kind != FINISHED:
                self._channels[kind].see(module, rows)

    def findings(self) -> Findings:
        for seen in self._seen:
            seen.update({m: seen[first] for m, first in self._readers.first.items()})
        empty = [m for m in self.modules if m not in self._readers.first]
        if empty:
            return Findings([f"{m}:input: no input of that module was seen" for m in empty])
        wrong, unjudged = [], []
        for measure in self._measures:
            bound = self._moved(measure)
            wrong += self._beyond(measure, bound)
            if not math.isfinite(bound):
                count = len(self._tensors)
                unjudged.append(f"{count} static ranges, too few to know how they move")
        return Findings([message for _, message in sorted(wrong, reverse=True)], unjudged)

    def _moved(self, measure: _Measure) -> float:
        """How far quantization moves ranges of this model at most."""
        moved = []
        for module in self._tensors:
            common = self._seen[COMMON][module]
            floats, own = measure.choose(self._seen[FLOAT][module]), measure.choose(common)
            moved.append(measure.far(common, floats, own))
        # Before the first quantized module nothing moves: its zero says nothing of the others.
        return normal_bound([far for far in moved if far], len(self._tensors))

    @property
    def _tensors(self) -> Sequence[str]:
        """One module of all that read the same."""
        return tuple(dict.fromkeys(self._readers.first.values()))

    def _clips_what_moves(self, module: str, kept: Range, resolution: float) -> bool:
        """Whether the range is too narrow for no more channels, and by no more, than channels move
        for. False of a method that goes by more than extremes."""
        floats, common = (
            self._channels[k].of(self._readers.first[module]) for k in (FLOAT, COMMON)
        )
        if floats is None or common is None:
            return False
        moved = (common - floats).abs().flatten().sort().values
        beyond = torch.stack([kept.low - common[0], common[1] - kept.high])
        return bool((beyond.flatten().sort().values <= 2 * moved + resolution).all())

    def _beyond(self, measure: _Measure, bound: float) -> list[tuple[float, str]]:
        """(measured over limit, what is wrong)."""
        wrong = []
        for module, histogram in self._seen[FINISHED].items():
            kept, chosen = self._state.ranges[input_name(module)], self._choose(histogram)
            far = measure.far(histogram, kept, chosen)
            resolution = measure.resolution(histogram, chosen)
            limit, width = bound + resolution, _width(chosen)
            wider = max(chosen.low - kept.low, kept.high - chosen.high) / width
            narrowed = wider <= limit and self._clips_what_moves(module, kept, resolution * width)
            if not far <= limit and not narrowed:
                shown = breach(far, limit)
                message = (
                    f"{module}:input: [{kept.low:.4g}, {kept.high:.4g}] is {shown[0]} "
                    f"{measure.unit} from what the calibration texts give, [{chosen.low:.4g}, "
                    f"{chosen.high:.4g}]; quantization moves ranges of this model by up to "
                    f"{shown[1]}"
                )
                wrong.append((far / limit, message))
        return wrong


class _ChannelEnds:
    """The least and the largest value of each channel of what modules read."""

    def __init__(self) -> None:
        self._ends: dict[str, Tensor] = {}

    def see(self, module: str, rows: Tensor) -> None:
        """rows: (tokens, channels), or images (count, channels, height, width)."""
        if not len(rows):
            return
        others = [axis for axis in range(rows.ndim) if axis != 1]
        ends = torch.stack([rows.amin(others), rows.amax(others)])
        before = self._ends.get(module, ends)
        self._ends[module] = torch.stack(
            [torch.minimum(before[0], ends[0]), torch.maximum(before[1], ends[1])]
        )

    def of(self, module: str) -> Tensor | None:
        """(2, channels); None of a module not seen."""
        return self._ends.get(module)


@dataclass(frozen=True)
class _Measure:
    """choose: the range whose movement limits how far others may be. far: of (histogram, a range,
    the range chosen there). resolution: how far two ranges of one distribution may be, of
    (histogram, the chosen one)."""

    unit: str
    choose: Callable[[Histogram], Range]
    far: Callable[[Histogram, Range, Range], float]
    resolution: Callable[[Histogram, Range], float]


def _measures(method: Activations) -> tuple[_Measure, ...]:
    """By the ends; of a searched range by its loss. The loss of entropy sees magnitudes only, so
    that the ends must besides be what was seen up to the range's own limit."""
    name = method.range
    choose = chooser(name, method.percentile, method.symmetric)

    def ends(_: Histogram, kept: Range, best: Range) -> float:
        return _apart(kept, best)

    def beside(histogram: Histogram, best: Range) -> float:
        others = neighbours(name, histogram, best)
        return max(excess_loss(name, histogram, other, best) for other in others)

    def seen(histogram: Histogram) -> Range:
        return minmax(histogram, method.symmetric)

    def cut(histogram: Histogram, kept: Range, _: Range) -> float:
        limit = max(-kept.low, kept.high)
        return _apart(kept, clip_range(histogram, method.symmetric, limit))

    loss = partial(excess_loss, name)
    if not is_searched(name):
        return (_Measure("of its width", choose, ends, _resolution),)
    if name == "mse":
        words = "(root of the share by which the squared error is larger)"
        return (_Measure(words, choose, loss, beside),)
    nats = _Measure("(root of the nats lost)", choose, loss, beside)
    return nats, _Measure("of its width", seen, cut, _resolution)


def _resolution(histogram: Histogram, chosen: Range) -> float:
    """What a bin of the histogram and a step of the integers cannot tell apart, as a share of the
    range's width."""
    return histogram.width / _width(chosen) + 1 / 255


def _width(covered: Range) -> float:
    return max(covered.high - covered.low, 1e-30)


def _apart(a: Range, b: Range) -> float:
    """How far the further pair of ends lies apart, as a share of the wider of both. Judged as they
    are coded: a symmetric range by its scale, whatever it calls its ends."""
    ends = [tuple(end * r.scale for end in integer_ends(r)) for r in (a, b)]
    far = max(abs(x - y) for x, y in zip(*ends, strict=True))
    return float(far / max(_width(a), _width(b)))
