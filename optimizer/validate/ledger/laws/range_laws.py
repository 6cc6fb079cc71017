"""Check the static activation ranges that compress stored, on the calibration texts.

compared   each stored range, and the range that the same method chooses on the inputs of the
           finished model. The measure is the distance of the ends; for a method that minimizes a
           loss, it is that loss, which may be flat around its minimum.
limit      measured in the same run: the upper tolerance bound of that distance between float and
           quantized inputs of the model, over all tensors that modules read and one batch in four;
           for a range beyond it, twice that distance of its own tensor over all batches
caught     ranges four times too wide or too narrow, ends exchanged, a neighbour's range:
           test_a_planted_fault_is_caught_at_its_hop,
           test_a_range_with_a_wrong_end_is_refused_and_named

The input that a range was measured on lies no further from the float model's than the finished
model's does, so by the triangle inequality the stored range may lie twice as far from the finished
model's as the float model's does. That differs from tensor to tensor: one token whose attention
changes moves the ends of a percentile of few tokens.

A minmax range may besides be too narrow in some channels. SmoothQuant fits its factors to the
extremes of channels on these very texts, so any other input, float or quantized, exceeds the range
in the channels that grow, by up to twice the movement between the two. It is random which channel
moves, so the k-th largest excess is compared with twice the k-th largest movement: a range that is
too narrow in many channels is refused.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from optimizer.compress.methods.activations.activation_ranges import (
    MagnitudeHistogram,
    clip_range,
    compute_excess_loss,
    get_chooser,
    is_searched,
    list_neighbours,
    minmax,
)
from optimizer.foundation.rounding.tolerance import normal_bound
from optimizer.foundation.state import STATIC, CompressedState, Range, input_name, owner_of
from optimizer.model.architectures.operands import (
    find_attention,
    find_cache,
    is_probabilities,
    select_caches,
)
from optimizer.recipe.schema import Activations
from optimizer.validate.ledger.breach import write_breach
from optimizer.validate.ledger.laws.calibration_laws import (
    COMMON,
    FINISHED,
    FLOAT,
    REST,
    Findings,
    SharedInputs,
    compute_integer_ends,
)


def unlike_recipe(state: CompressedState, kv_cache: str) -> list[str]:
    """Return [a sentence] where FP8 KV caches in the state contradict `kv_cache`, the recipe's
    quantize.kv_cache; else []."""
    caches = select_caches(state)
    if bool(caches) == (kv_cache == "float8"):
        return []
    return [f"{len(caches)} keys and values of KV caches are in FP8; kv_cache is {kv_cache}"]


class RangeLaw:
    """Compare each static range with the range that the same method chooses on the finished model's
    inputs. One law judges one kind of range: of inputs of modules by default.

    method: quantize.activations of the recipe; None: no range is judged
    operands: True to judge operands of attentions, except probabilities
    caches: True to judge KV caches
    """

    def __init__(
        self,
        state: CompressedState,
        method: Activations | None,
        *,
        operands: bool = False,
        caches: bool = False,
    ) -> None:
        static = method is not None and (caches or state.activations in STATIC)
        self.modules = tuple(
            name
            for name in map(owner_of, state.ranges if static else ())
            if (bool(find_attention(name)), bool(find_cache(name))) == (operands, caches)
            and not is_probabilities(name)
        )
        self._state = state
        if method is not None:
            self._measures = _measures(method)
            self._choose = get_chooser(method.range, method.percentile, method.is_symmetric)
            self._only_ends = method.range == "minmax"
        self._readers = SharedInputs(state, self.modules)
        self._seen = [{m: MagnitudeHistogram() for m in self.modules} for _ in range(4)]
        self._channels = {kind: _ChannelEnds() for kind in (COMMON, FLOAT)}
        self._doubtful: tuple[str, ...] = ()
        self._complete = False  # the float inputs of doubtful modules, on all batches

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
            if self._only_ends and kind in self._channels:
                self._channels[kind].see(module, rows)

    def findings(self) -> Findings:
        for seen in self._seen:
            seen.update({m: seen[first] for m, first in self._readers.first.items()})
        empty = [m for m in self.modules if m not in self._readers.first]
        if empty:
            return Findings([f"{m}:input: no input of that module was seen" for m in empty])
        wrong, unjudged = list[tuple[float, str, str]](), []
        chosen = {m: self._choose(seen) for m, seen in self._seen[FINISHED].items()}
        for measure in self._measures:
            bound = self._moved(measure)
            wrong += self._beyond(measure, bound, chosen)
            if not math.isfinite(bound):
                count = len(self._tensors)
                unjudged.append(
                    f"{count} static ranges, too few to measure how quantization moves them"
                )
        self._doubtful = tuple(dict.fromkeys(self._readers.first[module] for _, module, _ in wrong))
        return Findings([message for _, _, message in sorted(wrong, reverse=True)], unjudged)

    def doubtful(self) -> Sequence[str]:
        self._complete = True
        return self._doubtful

    def _moved(self, measure: _RangeDistance) -> float:
        """Return the limit: the upper tolerance bound of the distances between ranges chosen on
        float and on quantized inputs, over all tensors."""
        moved = []
        for module in self._tensors:
            common = self._seen[COMMON][module]
            floats, quantized = measure.choose(self._seen[FLOAT][module]), measure.choose(common)
            moved.append(measure.far(common, floats, quantized))
        # inputs before the first quantized module do not move, and their 0 is not evidence
        return normal_bound([far for far in moved if far], len(self._tensors))

    @property
    def _tensors(self) -> Sequence[str]:
        """Tensors whose ranges the law judges, each by the name of the first module that reads
        it."""
        return tuple(dict.fromkeys(self._readers.first.values()))

    def _within_channels(self, module: str, stored: Range, resolution: float) -> bool:
        """Return True where channels exceed a minmax range by at most twice their movement between
        float and quantized inputs: the k-th largest excess is compared with the k-th largest
        movement.

        stored: range in the state
        resolution: width of the values that the histogram cannot separate
        """
        floats, common = (
            self._channels[k].of(self._readers.first[module]) for k in (FLOAT, COMMON)
        )
        if floats is None or common is None:
            return False
        moved = (common - floats).abs().flatten().sort().values
        beyond = torch.stack([stored.low - common[0], common[1] - stored.high])
        return bool((beyond.flatten().sort().values <= 2 * moved + resolution).all())

    def _moved_alone(self, measure: _RangeDistance, module: str) -> float:
        """Return the distance that the range of `module` may have from the range of the finished
        model's inputs: twice the distance of the float model's, over all batches; 0 before those
        inputs are known."""
        if not self._complete:
            return 0.0
        floats = copy.deepcopy(self._seen[REST][module])
        floats.merge(self._seen[FLOAT][module])
        finished = self._seen[FINISHED][module]
        return 2 * measure.far(finished, measure.choose(floats), measure.choose(finished))

    def _beyond(
        self, measure: _RangeDistance, bound: float, ranges: Mapping[str, Range]
    ) -> list[tuple[float, str, str]]:
        """Return (distance over its limit, module, problem) of each range beyond its limit.

        bound: result of _moved
        ranges: range of the finished model's inputs of each module, by the recipe's method
        """
        wrong = []
        for module, histogram in self._seen[FINISHED].items():
            stored, chosen = self._state.ranges[input_name(module)], ranges[module]
            far = measure.far(histogram, stored, chosen)
            resolution = measure.resolution(histogram, chosen)
            moved = max(bound, self._moved_alone(measure, module))
            limit, width = moved + resolution, _width(chosen)
            wider = max(chosen.low - stored.low, stored.high - chosen.high) / width
            narrowed = wider <= limit and self._within_channels(module, stored, resolution * width)
            if not far <= limit and not narrowed:
                shown = write_breach(far, limit)
                message = (
                    f"{module}:input: [{stored.low:.4g}, {stored.high:.4g}] is {shown[0]} "
                    f"{measure.unit} from the range of the calibration texts, [{chosen.low:.4g}, "
                    f"{chosen.high:.4g}]; quantization moves ranges of this model by up to "
                    f"{shown[1]}"
                )
                wrong.append((far / limit, module, message))
        return wrong


class _ChannelEnds:
    """Least and largest value of each channel of every module's input over the calibration data."""

    def __init__(self) -> None:
        self._ends: dict[str, Tensor] = {}

    def see(self, module: str, rows: Tensor) -> None:
        """Update the ends with inputs of a module.

        rows: (tokens, channels), or images (count, channels, height, width)
        """
        if not len(rows):
            return
        others = [axis for axis in range(rows.ndim) if axis != 1]
        ends = torch.stack([rows.amin(others), rows.amax(others)])
        before = self._ends.get(module, ends)
        self._ends[module] = torch.stack(
            [torch.minimum(before[0], ends[0]), torch.maximum(before[1], ends[1])]
        )

    def of(self, module: str) -> Tensor | None:
        """(2, channels): least and largest values; None for a module without inputs so far."""
        return self._ends.get(module)


@dataclass(frozen=True)
class _RangeDistance:
    """A way to measure the distance of two ranges on one histogram.

    unit: unit of the distance in messages
    choose: function histogram -> range that the method chooses
    far: function (histogram, stored range, chosen range) -> distance
    resolution: function (histogram, range) -> distance that the histogram cannot separate
    """

    unit: str  # words behind the distance in a message
    choose: Callable[
        [MagnitudeHistogram], Range
    ]  # range whose movement by quantized inputs sets the limit
    far: Callable[
        [MagnitudeHistogram, Range, Range], float
    ]  # distance of a range to the chosen one
    resolution: Callable[[MagnitudeHistogram, Range], float]  # smallest distance that counts


def _measures(method: Activations) -> tuple[_RangeDistance, ...]:
    """List the distances that judge a method: that of the ends, or for a searched range that of the
    loss. The entropy loss reads magnitudes only, so its ends are also compared with the observed
    ends, as far as the range's own limit allows."""
    name = method.range
    choose = get_chooser(name, method.percentile, method.is_symmetric)

    def ends(_: MagnitudeHistogram, stored: Range, best: Range) -> float:
        return _apart(stored, best)

    def beside(histogram: MagnitudeHistogram, best: Range) -> float:
        others = list_neighbours(name, histogram, best)
        return max(compute_excess_loss(name, histogram, other, best) for other in others)

    def seen(histogram: MagnitudeHistogram) -> Range:
        return minmax(histogram, method.is_symmetric)

    def cut(histogram: MagnitudeHistogram, stored: Range, _: Range) -> float:
        limit = max(-stored.low, stored.high)
        return _apart(stored, clip_range(histogram, method.is_symmetric, limit))

    loss = partial(compute_excess_loss, name)
    if not is_searched(name):
        return (_RangeDistance("of its width", choose, ends, _resolution),)
    if name == "mse":
        words = "(root of the share by which the squared error is larger)"
        return (_RangeDistance(words, choose, loss, beside),)
    nats = _RangeDistance("(root of the nats lost)", choose, loss, beside)
    return nats, _RangeDistance("of its width", seen, cut, _resolution)


def _resolution(histogram: MagnitudeHistogram, chosen: Range) -> float:
    """Return the range law's resolution: the width of a histogram bin plus that of an integer step,
    as a share of the range's width."""
    return histogram.width / _width(chosen) + 1 / 255


def _width(covered: Range) -> float:
    return max(covered.high - covered.low, 1e-30)


def _apart(a: Range, b: Range) -> float:
    """Return the range law's distance: that of the pair of ends that lies further apart, as a share
    of the wider range. Ends are those of the integers, so a symmetric range is judged by its
    scale."""
    ends = [tuple(end * r.scale for end in compute_integer_ends(r)) for r in (a, b)]
    far = max(abs(x - y) for x, y in zip(*ends, strict=True))
    return float(far / max(_width(a), _width(b)))
