"""Laws of what was measured on the calibration texts: they go through the finished model once more,
a part of them through the folded float model as well.

 1. ranges       a static range lies no further from the one that the same method chooses on the
                 inputs of the finished model than ranges of the float model do: quantization moves
                 what a module reads by some part of that. "Further" is by the ends; of a method
                 that searches the least of some loss, by that loss, which may be flat
 2. corrections  what a bias was corrected by lies no further from what quantization takes from the
                 mean output in the finished model, clipping left out
                 (compress/apply/bias_correction.py), than what it takes in the float model does

Both limits are measured in the run: the upper tolerance bound, over all modules, of how far the
same statistic of float inputs lies from that of quantized ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn

from optimizer.compress.methods.activation_ranges import (
    Histogram,
    chooser,
    limited,
    minmax,
    neighbours,
    searched,
    worse,
)
from optimizer.compress.simulate import code_per_token, code_static
from optimizer.filters import Filters
from optimizer.harness.inputs.batch import Batch
from optimizer.operands import attention_of, is_probabilities
from optimizer.recipe.schema import Activations
from optimizer.state import CompressedState, Range, input_name, owner_of, weight_name
from optimizer.validate.ledger import trace
from optimizer.validate.ledger.breach import breach
from optimizer.validate.ledger.spread import normal_bound

COMPARED = 4  # of so many calibration batches one goes through the float model as well
FINISHED, COMMON, FLOAT = range(3)
"""Inputs of the finished model, those on the batches of both models, and of the float one."""

SAME = 2.0**-20
"""Means of float32 values nearer than sixteen roundoffs are of the same values."""


class Law(Protocol):
    """Collects what modules read, then says what is wrong."""

    @property
    def modules(self) -> Sequence[str]:
        """Those whose inputs it wants to see."""

    def see(self, kinds: Sequence[int], module: str, rows: Tensor) -> None:
        """rows: (tokens, width), real tokens only, of each of `kinds`."""

    def verdict(self) -> Verdict:
        """With the checkpoint's names, the worst first."""


@dataclass(frozen=True)
class Verdict:
    """problems: what is wrong. unjudged: what this model is too small to give a limit for."""

    problems: Sequence[str] = ()
    unjudged: Sequence[str] = ()


def judge(
    laws: Sequence[Law], finished: nn.Module, floats: nn.Module, batches: Iterable[Batch]
) -> Verdict:
    """finished: the simulated model; floats: the folded float one; batches: of the calibration
    texts."""
    laws = [law for law in laws if law.modules]
    if not laws:
        return Verdict()

    def observe(model: nn.Module, batch: Batch, *kinds: int) -> None:
        modules = dict.fromkeys(module for law in laws for module in law.modules)

        def see(module: str, rows: Tensor) -> None:
            for law in laws:
                if module in law.modules:
                    law.see(kinds, module, rows)

        trace.observe(model, batch, modules, see)

    for i, batch in enumerate(batches):
        if i % COMPARED:
            observe(finished, batch, FINISHED)
        else:
            observe(finished, batch, FINISHED, COMMON)
            observe(floats, batch, FLOAT)
    verdicts = [law.verdict() for law in laws]
    return Verdict(
        [problem for v in verdicts for problem in v.problems],
        [reason for v in verdicts for reason in v.unjudged],
    )


class _Readers:
    """Which modules read one tensor alike, by range, factor and filters: the first collects for
    all. filters: of those modules that are convolutions, where it matters."""

    def __init__(
        self,
        state: CompressedState,
        modules: Sequence[str],
        filters: Mapping[str, Filters | None] = MappingProxyType({}),
    ) -> None:
        self.filters = {m: filters.get(m) for m in modules}
        self.ranges = {m: state.range_of(m) for m in modules}
        self.factors = {m: state.factor_of(m) for m in modules}
        self.first: dict[str, str] = {}
        self._rows: Tensor | None = None
        self._firsts: list[str] = []

    def collects(self, module: str, rows: Tensor) -> bool:
        """rows: one object for all modules that read it in turn (trace.observe)."""
        if rows is not self._rows:
            self._rows, self._firsts = rows, []
        for first in self._firsts:
            alike = self.ranges[first] == self.ranges[module]
            alike &= self.filters[first] == self.filters[module]
            if alike and _equal(self.factors[first], self.factors[module]):
                self.first[module] = first
                return False
        self._firsts.append(module)
        self.first[module] = module
        return True


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


class Ranges:
    """Law 1, of what modules read, or (operands) of what attentions multiply but probabilities."""

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
        self._readers = _Readers(state, self.modules)
        self._seen = [{m: Histogram() for m in self.modules} for _ in range(3)]

    def see(self, kinds: Sequence[int], module: str, rows: Tensor) -> None:
        if not self._readers.collects(module, rows):
            return
        factor = self._readers.factors[module]
        for kind in kinds:
            histogram = self._seen[kind][module]
            see = histogram.extend if self._only_ends else histogram.update
            see(rows if factor is None else rows * factor)

    def verdict(self) -> Verdict:
        for seen in self._seen:
            seen.update({m: seen[first] for m, first in self._readers.first.items()})
        empty = [m for m in self.modules if m not in self._readers.first]
        if empty:
            return Verdict([f"{m}:input: no input of that module was seen" for m in empty])
        wrong, unjudged = [], []
        for measure in self._measures:
            bound = self._moved(measure)
            wrong += self._beyond(measure, bound)
            if not math.isfinite(bound):
                unjudged.append(f"{len(self.modules)} static ranges, too few to know how they move")
        return Verdict([message for _, message in sorted(wrong, reverse=True)], unjudged)

    def _moved(self, measure: _Measure) -> float:
        """How far quantization moves ranges of this model at most."""
        moved = []
        for module, common in self._seen[COMMON].items():
            floats, own = measure.choose(self._seen[FLOAT][module]), measure.choose(common)
            moved.append(measure.far(common, floats, own))
        # Before the first quantized module nothing moves: its zero says nothing of the others.
        return normal_bound([far for far in moved if far], len(self.modules))

    def _beyond(self, measure: _Measure, bound: float) -> list[tuple[float, str]]:
        """(measured over limit, what is wrong)."""
        wrong = []
        for module, histogram in self._seen[FINISHED].items():
            kept, chosen = self._state.ranges[input_name(module)], self._choose(histogram)
            far = measure.far(histogram, kept, chosen)
            limit = bound + measure.resolution(histogram, chosen)
            if not far <= limit:
                shown = breach(far, limit)
                message = (
                    f"{module}:input: [{kept.low:.4g}, {kept.high:.4g}] is {shown[0]} "
                    f"{measure.unit} from what the calibration texts give, [{chosen.low:.4g}, "
                    f"{chosen.high:.4g}]; quantization moves ranges of this model by up to "
                    f"{shown[1]}"
                )
                wrong.append((far / limit, message))
        return wrong


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
        return max(worse(name, histogram, other, best) for other in others)

    def seen(histogram: Histogram) -> Range:
        return minmax(histogram, method.symmetric)

    def cut(histogram: Histogram, kept: Range, _: Range) -> float:
        limit = max(-kept.low, kept.high)
        return _apart(kept, limited(histogram, method.symmetric, limit))

    loss = partial(worse, name)
    if not searched(name):
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
    ends = [tuple(end * r.scale for end in _ends(r)) for r in (a, b)]
    far = max(abs(x - y) for x, y in zip(*ends, strict=True))
    return float(far / max(_width(a), _width(b)))


class Corrections:
    """Law 2. corrections: {bias: what was added to it}; source: the checkpoint's parameters;
    filters: of a module, None where it is no convolution."""

    def __init__(
        self,
        state: CompressedState,
        source: Mapping[str, Tensor],
        corrections: Mapping[str, Tensor],
        filters: Callable[[str], Filters | None],
    ) -> None:
        self._state, self._source, self._corrections = state, source, corrections
        self.modules = tuple(name.removesuffix(".bias") for name in corrections)
        self._readers = _Readers(state, self.modules, {m: filters(m) for m in self.modules})
        self._seen = [{m: _Mean() for m in self.modules} for _ in range(3)]

    def see(self, kinds: Sequence[int], module: str, rows: Tensor) -> None:
        if not self._readers.collects(module, rows):
            return
        factor, covered = self._readers.factors[module], self._readers.ranges[module]
        x = rows if factor is None else rows * factor
        coded = x
        if self._state.activations == "token":
            coded = code_per_token(x)
        elif covered is not None:
            low, high = (end * covered.scale for end in _ends(covered))
            x, coded = x.clamp(low, high), code_static(x, covered)
        laid = self._readers.filters[module]
        if laid is not None:
            x, coded = laid.mean_patches(x), laid.mean_patches(coded)
        for kind in kinds:
            self._seen[kind][module].update(x, coded)

    def verdict(self) -> Verdict:
        for seen in self._seen:
            seen.update({m: seen[first] for m, first in self._readers.first.items()})
        moved = [
            _relative(self._lost(FLOAT, module), self._lost(COMMON, module))
            for module in self.modules
            if self._reads_others(module)
        ]
        limit = normal_bound(moved, len(self.modules))
        wrong = []
        for module in self.modules:
            kept = self._corrections[f"{module}.bias"].double()
            far = _relative(kept, self._lost(FINISHED, module))
            if not far <= limit:
                shown = breach(far, limit)
                message = (
                    f"{module}.bias: its correction lies {shown[0]} of its size from what "
                    f"quantization takes from the mean output on the calibration texts; between "
                    f"float and quantized inputs that differs by up to {shown[1]}"
                )
                wrong.append((far, message))
        reason = f"{len(self.modules)} corrections of biases, too few to know how they move"
        return Verdict(
            [message for _, message in sorted(wrong, reverse=True)],
            [] if math.isfinite(limit) else [reason],
        )

    def _reads_others(self, module: str) -> bool:
        """Whether quantization before it changed what the module reads, by more than rounding."""
        floats, own = self._seen[FLOAT][module].exact, self._seen[COMMON][module].exact
        return _relative(floats, own) > SAME

    def _lost(self, kind: int, module: str) -> Tensor:
        """(outputs,) float64: the mean float output less the mean quantized one, same input. Both
        are linear in what is multiplied, so that the mean inputs are enough."""
        weight, seen = weight_name(module), self._seen[kind][module]
        exact = self._state.replaced.get(weight, self._source[weight]).double().flatten(1)
        factor = self._readers.factors[module]
        if factor is not None:
            exact = exact / factor.double()
        quantized = self._state.weights[weight].dequantize().double()
        laid = self._readers.filters[module]
        if laid is not None:
            return laid.at_patch(exact, seen.exact) - laid.at_patch(quantized, seen.coded)
        return exact @ seen.exact - quantized @ seen.coded


class _Mean:
    """The mean of what a module reads, and of what its integers say."""

    def __init__(self) -> None:
        self._sums: tuple[Tensor, Tensor] | None = None
        self._count = 0

    def update(self, exact: Tensor, coded: Tensor) -> None:
        sums = exact.sum(0, dtype=torch.float64), coded.sum(0, dtype=torch.float64)
        before = self._sums
        self._sums = sums if before is None else (before[0] + sums[0], before[1] + sums[1])
        self._count += len(exact)

    @property
    def exact(self) -> Tensor:
        assert self._sums is not None
        return self._sums[0] / max(self._count, 1)

    @property
    def coded(self) -> Tensor:
        assert self._sums is not None
        return self._sums[1] / max(self._count, 1)


def _ends(covered: Range) -> tuple[int, int]:
    return -covered.zero_point, 255 - covered.zero_point


def _relative(a: Tensor, b: Tensor) -> float:
    """|a - b| over the larger norm; 0 where both are nothing."""
    size = max(float(a.norm()), float(b.norm()))
    return float((a - b).norm()) / size if size else 0.0
