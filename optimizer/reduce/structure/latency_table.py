"""Choose the sizes that reach a latency gain, from a table of timed sizes.

Many sizes reach it: fewer blocks, or fewer neurons in more of them. Times do not tell which of them
is most accurate. So the largest sizes for several numbers of blocks and heads are candidates, and
reduce makes the one whose answers are nearest to the reference (nearest.py).

The model of time: a part outside the blocks, and a sum over the blocks, each a part of its neurons
and a part of its heads. As a share of the unreduced model's time, with B blocks, F neurons and
H heads of which b, f and h stay:

    ratio(b, f, h) = outside + b / B * (1 - outside + ffn(f) + heads(h)),    ffn(F) = heads(H) = 0

(Where the gain is over float, this is the share of the unreduced quantized model's time, which is
timed too.) `ffn` and `heads` interpolate the ratios, less 1, of timed models with fewer neurons or
heads alone, linearly and rising: a narrower layer that seemed slower is noise, and isotonic least
squares removes it. `outside` is fitted to models of fewer blocks.

Kernels have steps and parts do not add up exactly, so the chosen sizes are built and timed too.
Their saving / their predicted saving corrects the predictions of other numbers of neurons with the
same blocks and heads; the average corrects all other predictions.

The folder of stage `latencies` has unreduced/, with the model.onnx that the gain is over, in the
target's quantization or in float, and table.json (version 2):
    version, machine, threads   where it was timed
    target, cell        target, and timed cell {"batch", and "sequence" or "prompt"}
    goal, least         latency gain of the recipe, and the least that counts as met
    over                precision of the model that the gain is over, as reduce.gain_over
    whole               entry of the unreduced model as the target runs it, where `over` is float
    unreduced           sizes of the unreduced model; sizes are {blocks, ffn, heads}
    entries             [{sizes, ratio, interval, runs, p50}]: the table; ratio: median over rounds
                        of its time / that of unreduced/; p50: {unreduced, candidate} in ms
    outside             fitted share of the time outside the blocks
    confirmed           [{sizes, predicted, ratio, ...}]: sizes chosen from the table, in order
    candidates          sizes of which reduce makes one, the least cut first
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from optimizer.foundation.errors import RecipeError
from optimizer.model.checkpoint.checkpoint import read_json
from optimizer.recipe.reduce import Reduce
from optimizer.reduce.structure.sizes import (
    SizeChoices,
    Sizes,
    cut,
    drop_smaller,
    find_largest,
    find_widest,
)

VERSION = 2
TABLE, UNREDUCED = "table.json", "unreduced"
WIDTHS, FEWER = (2**-0.5, 0.5, 0.25), (0.5,)  # timed shares of neurons, and of heads and blocks
EPSILON = float(np.finfo(float).eps)
CANDIDATES = 4  # pairs (blocks, heads) whose largest sizes within the goal become candidates
ATTEMPTS = 2 * CANDIDATES  # sizes that are built and timed to confirm them

Interval = tuple[float | None, float | None]


@dataclass(frozen=True)
class TimedSize:
    """Sizes of a smaller model, with the time that they took.

    ratio: median over rounds of this size's time / the time of the model in unreduced/
    interval: (lower, upper) bound of the ratio; None: unknown
    runs, p50: number of rounds, and median times, see the module
    """

    sizes: Sizes
    ratio: float
    interval: Interval = (None, None)
    runs: int = 0
    p50: dict[str, float] | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def read_timed(document: dict[str, Any]) -> TimedSize:
    """Build a TimedSize from its JSON form (TimedSize.as_dict)."""
    low, high = document["interval"]
    sizes = Sizes(**document["sizes"])
    return TimedSize(sizes, document["ratio"], (low, high), document["runs"], document["p50"])


@dataclass(frozen=True)
class LatencyTable:
    """Measured times of models of several sizes, by which the time of any sizes is predicted.

    full: sizes of the unreduced model
    entries: sizes that differ from `full` in one number, and the smallest
    known: sizes that were chosen from the table and timed
    whole: ratio of `full`; 1 where `full` is the model that all sizes are compared with
    """

    full: Sizes
    entries: tuple[TimedSize, ...]
    known: tuple[TimedSize, ...] = ()
    whole: float = 1.0

    def ratio(self, sizes: Sizes) -> float:
        """Return the predicted time divided by that of the model that all sizes are compared with.
        It never rises when neurons are removed nor, without `known`, when any size shrinks."""
        return self.whole * (1 - self._correction(sizes) * self._saved(sizes))

    def faster(self, gain: float) -> Callable[[Sizes], bool]:
        """Return a predicate on sizes, True for those, other than `full`, that are predicted to
        reach the speedup `gain`."""
        return lambda sizes: sizes != self.full and self.ratio(sizes) <= 1 / gain

    def _saved(self, sizes: Sizes) -> float:
        """Return the share of the time that sizes save as the table's entries alone predict it,
        without correction."""
        inside = 1 - self.outside + self._added("ffn", sizes) + self._added("heads", sizes)
        return 1 - self.outside - sizes.blocks / self.full.blocks * max(inside, 0.0)

    def _correction(self, sizes: Sizes) -> float:
        """Return measured / predicted saving at these numbers of blocks and heads; if none was
        timed there, the average over all sizes in `known`; if `known` is empty, 1."""
        shares = {
            (t.sizes.blocks, t.sizes.heads): max(1 - t.ratio / self.whole, EPSILON) / saved
            for t in self.known
            if (saved := self._saved(t.sizes)) > 0
        }
        average = float(np.mean([*shares.values()])) if shares else 1.0
        return shares.get((sizes.blocks, sizes.heads), average)

    @property
    def outside(self) -> float:
        """Share of a model's time outside the blocks, which no reduction saves, by least squares: r
        = o + (1 - o) b / B."""
        fewer = [
            (t.sizes.blocks / self.full.blocks, t.ratio / self.whole)
            for t in self.entries
            if t.sizes == replace(self.full, blocks=t.sizes.blocks) != self.full
        ]
        weights = sum((1 - share) ** 2 for share, _ in fewer)
        fitted = sum((ratio - share) * (1 - share) for share, ratio in fewer)
        return min(max(fitted / weights, 0.0), 1.0) if fewer else 0.0

    def _added(self, kind: str, sizes: Sizes) -> float:
        """Return ffn(f) or heads(h) of the module's formula, which is 0 or less.

        kind: "ffn" or "heads"
        """
        points = {
            getattr(t.sizes, kind): t.ratio / self.whole - 1
            for t in self.entries
            if t.sizes == replace(self.full, **{kind: getattr(t.sizes, kind)})
        }
        points[getattr(self.full, kind)] = 0.0
        counts = sorted(points)
        rising = np.minimum(_rising([points[count] for count in counts]), 0.0)
        return float(np.interp(getattr(sizes, kind), counts, rising))


def _rising(values: Sequence[float]) -> list[float]:
    """Fit measured times of smaller models by values that do not fall from one size to the next
    larger (isotonic least squares): max over i <= k of min over j >= k of the mean of values[i..j]
    (Barlow et al. 1972)."""
    count = range(len(values))
    return [
        max(min(float(np.mean(values[i : j + 1])) for j in count[k:]) for i in count[: k + 1])
        for k in count
    ]


def list_grid(model: SizeChoices) -> tuple[Sizes, ...]:
    """List the sizes to time for the table. In each, one of neurons, heads and blocks is reduced
    and the others are full; the last one is the smallest model."""
    full, options = model.full, {"ffn": model.ffn, "heads": model.heads, "blocks": model.blocks}
    sizes = []
    for kind, numbers in options.items():
        shares = WIDTHS if kind == "ffn" else FEWER
        some = [_nearest(numbers, share * getattr(full, kind)) for share in shares]
        sizes += [replace(full, **{kind: n}) for n in (*some, min(numbers))]
    return tuple(s for s in dict.fromkeys([*sizes, model.smallest]) if s != full)


def _nearest(numbers: Sequence[int], wished: float) -> int:
    return min(numbers, key=lambda number: abs(number - wished))


def choose(
    table: LatencyTable, model: SizeChoices, section: Reduce, confirm: Callable[[Sizes], TimedSize]
) -> tuple[list[Sizes], list[tuple[float, TimedSize]]]:
    """Choose candidate sizes that meet goal.latency_gain and time them; return (candidates,
    [(predicted ratio, timed size)]).

    confirm: function that builds and times sizes

    For at most CANDIDATES pairs (blocks, heads), the least cut (sizes.py) first, sizes are timed
    until one surely meets the gain and exceeds it by no more than the tolerance, until none are
    left to try, or until the pair's share of ATTEMPTS is spent. Candidates are the sizes that
    surely meet the gain. If none do, the only candidate is the least cut that seemed fast enough,
    else the fastest; `validate` judges it. Raises RecipeError when the smallest sizes are not fast
    enough.
    """
    gain, least = section.latency_gain, section.least_gain
    assert gain is not None
    assert least is not None
    _refuse_unreachable(table, model, gain, least)
    tried: dict[Sizes, tuple[float, TimedSize]] = {}
    places = _spread(find_largest(model, table.faster(gain)) or [model.smallest])
    for place in places:
        for _ in range(ATTEMPTS // len(places)):
            sizes = _next(table, model, gain, place)
            if sizes is None or sizes in tried:
                break
            known = confirm(sizes)
            tried[sizes] = table.ratio(sizes), known
            table = replace(table, known=(*table.known, known))
            if is_surely_reached(known, least) and 1 / known.ratio <= 2 * gain - least:
                break
    return _candidates([known for _, known in tried.values()], model, least), [*tried.values()]


def _spread(sizes: Sequence[Sizes]) -> list[tuple[int, int]]:
    """Choose at most CANDIDATES pairs (blocks, heads) from `sizes`: the first one's, which is the
    least cut, and others spread evenly from the fewest blocks to the most, because the cut does not
    predict accuracy."""
    order = sorted({(s.blocks, s.heads) for s in sizes[1:]})
    count = min(CANDIDATES - 1, len(order))
    some = [order[round(i * (len(order) - 1) / max(count - 1, 1))] for i in range(count)]
    return [(sizes[0].blocks, sizes[0].heads), *some]


def _next(
    table: LatencyTable, model: SizeChoices, gain: float, place: tuple[int, int]
) -> Sizes | None:
    """Return the sizes with the most neurons that are predicted to reach the gain. If there are
    none, return the smallest model's sizes where they have the same (blocks, heads), else None.

    place: (blocks, heads)
    """
    sizes = find_widest(model, table.faster(gain), *place)
    smallest = model.smallest
    return smallest if sizes is None and place == (smallest.blocks, smallest.heads) else sizes


def _candidates(tried: Sequence[TimedSize], model: SizeChoices, least: float) -> list[Sizes]:
    def cut_of(known: TimedSize) -> float:
        return cut(known.sizes, model.full)

    sure = sorted((known for known in tried if is_surely_reached(known, least)), key=cut_of)
    if sure:
        return drop_smaller(known.sizes for known in sure)
    fast = [known for known in tried if known.ratio <= 1 / least]
    best = min(fast, key=cut_of) if fast else min(tried, key=lambda known: known.ratio)
    return [best.sizes]


def is_surely_reached(known: TimedSize, gain: float) -> bool:
    """Return True where the interval of the ratio lies below 1 / gain; False without an
    interval."""
    high = known.interval[1]
    return high is not None and high < 1 / gain


def _refuse_unreachable(table: LatencyTable, model: SizeChoices, gain: float, least: float) -> None:
    smallest = next((t for t in table.entries if t.sizes == model.smallest), None)
    if smallest is None or smallest.ratio > 1 / least:
        best = 1.0 if smallest is None else 1 / smallest.ratio
        raise RecipeError(
            f"{gain:g}, and the smallest model that these methods make is {best:.2f} times as fast "
            "on this machine as the unreduced one (as reduce.gain_over says)",
            where="reduce.goal.latency_gain",
            accepted=f"up to {best:.2f}" if best > 1 else "",
            fix="Lower the gain, or add methods to reduce.methods.",
        )


def refuse_reached(whole: TimedSize, section: Reduce) -> None:
    """Raise RecipeError where the unreduced model, quantized for the target, surely reaches the
    goal.

    whole: its time, compared with the float model's
    """
    gain = section.latency_gain
    assert gain is not None
    if is_surely_reached(whole, gain):
        raise RecipeError(
            f"{gain:g}, and the unreduced model, quantized for the target, is already "
            f"{1 / whole.ratio:.2f} times as fast as in float on this machine",
            where="reduce.goal.latency_gain",
            accepted=f"from {1 / whole.ratio:.2f}",
            fix="Remove reduce, or raise the gain.",
        )


def read_candidates(folder: Path) -> list[Sizes]:
    """Read the candidates that stage `latencies` wrote to `folder`."""
    return [Sizes(**sizes) for sizes in read_json(folder / TABLE)["candidates"]]
