"""Which sizes make a model so many times as fast: from a table of sizes that were timed.

Many do: fewer blocks, or fewer neurons in more of them. Which of these costs the model least no
table of times says. So the largest of several numbers of blocks and heads go on, and reduce takes
those whose model is nearest to the reference (nearest.py).

A time is taken as what lies outside the blocks and a sum over the blocks, in each of which the
neurons' part and the heads' part follow each other. As a share of the whole model's time, with
B blocks, F neurons and H heads of which b, f and h stay:

    ratio(b, f, h) = outside + b / B * (1 - outside + ffn(f) + heads(h)),    ffn(F) = heads(H) = 0

(Beside the model in float, where that is what the gain is over, this is the share of the whole
quantized one's time, which is timed too.) `ffn` and `heads` are what models of fewer neurons or
heads alone were timed at, less 1: straight lines between the measured numbers, and rising (a
narrower layer that seemed slower is noise: the nearest rising values, by least squares). `outside`
is fitted to models of fewer blocks.

Since kernels step, and parts do not add up to the last percent, the sizes so chosen are built and
timed too. What they save, as a share of what was predicted, corrects what is predicted of other
numbers of neurons with as many blocks and heads, and on the average of the rest.

The folder that the latencies stage writes has unreduced/, with the model.onnx that the gain is
over, in the target's form or in float, and table.json (version 2):
    version, machine, threads   where it was timed
    target, cell        what was timed: {"batch", and "sequence" or "prompt"}
    goal, least         the latency gain that the recipe asks for, and the least that counts as met
    over                what it is a gain over, as reduce.gain_over
    whole               the whole model in the target's form beside that: as an entry; null where it
                        is that
    unreduced           sizes of the whole model; sizes are {blocks, ffn, heads}
    entries             [{sizes, ratio, interval, runs, p50}]: the table; ratio: median over rounds
                        of its time over that of unreduced/; p50: {unreduced, candidate}, ms
    outside             share of the time outside the blocks, as fitted
    confirmed           [{sizes, predicted, ratio, ...}]: what was chosen from it, in order
    candidates          the sizes of which reduce makes one, the least cut first
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
from optimizer.reduce.structure.sizes import Model, Sizes, cut, largest, none_larger, widest

VERSION = 2
TABLE, UNREDUCED = "table.json", "unreduced"
WIDTHS, FEWER = (2**-0.5, 0.5, 0.25), (0.5,)  # shares of neurons, and of heads and blocks
EPSILON = float(np.finfo(float).eps)
CANDIDATES = 4  # numbers of blocks and heads of which the largest sizes that meet the goal go on
ATTEMPTS = 2 * CANDIDATES  # sizes that are built to see whether they meet it

Interval = tuple[float | None, float | None]


@dataclass(frozen=True)
class Timed:
    """A size and its time over that of what it is timed beside: the median over rounds, and its
    interval. runs, p50: of the measurement, see above."""

    sizes: Sizes
    ratio: float
    interval: Interval = (None, None)
    runs: int = 0
    p50: dict[str, float] | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def timed(document: dict[str, Any]) -> Timed:
    """What as_dict gave."""
    low, high = document["interval"]
    sizes = Sizes(**document["sizes"])
    return Timed(sizes, document["ratio"], (low, high), document["runs"], document["p50"])


@dataclass(frozen=True)
class Table:
    """entries: of sizes that differ from `full` in one number, and of the smallest. known: of those
    that were chosen from it, and timed. whole: the ratio of `full`, 1 where it is what all are
    timed beside."""

    full: Sizes
    entries: tuple[Timed, ...]
    known: tuple[Timed, ...] = ()
    whole: float = 1.0

    def ratio(self, sizes: Sizes) -> float:
        """The predicted time over that of what all are timed beside. Never more for fewer neurons;
        without `known` never more for smaller sizes."""
        return self.whole * (1 - self._correction(sizes) * self._saved(sizes))

    def faster(self, gain: float) -> Callable[[Sizes], bool]:
        """Whether sizes, other than all, are predicted to be so many times as fast."""
        return lambda sizes: sizes != self.full and self.ratio(sizes) <= 1 / gain

    def _saved(self, sizes: Sizes) -> float:
        """1 less the ratio, by the entries."""
        inside = 1 - self.outside + self._added("ffn", sizes) + self._added("heads", sizes)
        return 1 - self.outside - sizes.blocks / self.full.blocks * max(inside, 0.0)

    def _correction(self, sizes: Sizes) -> float:
        """How much is saved as a share of that. (Next to nothing where nothing was.)"""
        shares = {
            (t.sizes.blocks, t.sizes.heads): max(1 - t.ratio / self.whole, EPSILON) / saved
            for t in self.known
            if (saved := self._saved(t.sizes)) > 0
        }
        average = float(np.mean([*shares.values()])) if shares else 1.0
        return shares.get((sizes.blocks, sizes.heads), average)

    @property
    def outside(self) -> float:
        """Share of the time that no block takes, by least squares: r = o + (1 - o) b / B."""
        fewer = [
            (t.sizes.blocks / self.full.blocks, t.ratio / self.whole)
            for t in self.entries
            if t.sizes == replace(self.full, blocks=t.sizes.blocks) != self.full
        ]
        weights = sum((1 - share) ** 2 for share, _ in fewer)
        fitted = sum((ratio - share) * (1 - share) for share, ratio in fewer)
        return min(max(fitted / weights, 0.0), 1.0) if fewer else 0.0

    def _added(self, kind: str, sizes: Sizes) -> float:
        """What is added to the whole model's 1: 0 or less."""
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
    """The rising values nearest by least squares: max over i <= k of min over j >= k of the mean of
    values[i..j] (Barlow et al. 1972)."""
    count = range(len(values))
    return [
        max(min(float(np.mean(values[i : j + 1])) for j in count[k:]) for i in count[: k + 1])
        for k in count
    ]


def grid(model: Model) -> tuple[Sizes, ...]:
    """The sizes that are timed: of what may be chosen some numbers of neurons, heads and blocks,
    each with all of the others, and last the smallest of all."""
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
    table: Table, model: Model, section: Reduce, confirm: Callable[[Sizes], Timed]
) -> tuple[list[Sizes], list[tuple[float, Timed]]]:
    """The sizes that meet goal.latency_gain and of which no larger ones do, for CANDIDATES numbers
    of blocks and heads at most, the least cut (sizes.py) first; and the predicted ratio of those
    that were built to see, with what they were timed at.

    A number of blocks and heads is done with when its sizes are surely within the tolerance and no
    faster than it, either; or when no others are left to try, or its share of ATTEMPTS is spent.
    Candidates are those that are sure; where none is, the least cut that seemed fast enough, else
    the fastest; `validate` judges what comes of it.
    Raises RecipeError when the smallest sizes are not fast enough.
    """
    gain, least = section.latency_gain, section.least_gain
    assert gain is not None
    assert least is not None
    _refuse_unreachable(table, model, gain, least)
    tried: dict[Sizes, tuple[float, Timed]] = {}
    places = _spread(largest(model, table.faster(gain)) or [model.smallest])
    for place in places:
        for _ in range(ATTEMPTS // len(places)):
            sizes = _next(table, model, gain, place)
            if sizes is None or sizes in tried:
                break
            known = confirm(sizes)
            tried[sizes] = table.ratio(sizes), known
            table = replace(table, known=(*table.known, known))
            if surely(known, least) and 1 / known.ratio <= 2 * gain - least:
                break
    return _candidates([known for _, known in tried.values()], model, least), [*tried.values()]


def _spread(known: Sequence[Sizes]) -> list[tuple[int, int]]:
    """Numbers of blocks and heads: of the first sizes, which are the least cut, and of others
    spread evenly from the fewest blocks to the most: the cut is no judge of what they cost."""
    order = sorted({(s.blocks, s.heads) for s in known[1:]})
    count = min(CANDIDATES - 1, len(order))
    some = [order[round(i * (len(order) - 1) / max(count - 1, 1))] for i in range(count)]
    return [(known[0].blocks, known[0].heads), *some]


def _next(table: Table, model: Model, gain: float, place: tuple[int, int]) -> Sizes | None:
    """The most neurons that are predicted to do, or of the smallest model all that it has."""
    sizes = widest(model, table.faster(gain), *place)
    smallest = model.smallest
    return smallest if sizes is None and place == (smallest.blocks, smallest.heads) else sizes


def _candidates(tried: Sequence[Timed], model: Model, least: float) -> list[Sizes]:
    def cut_of(known: Timed) -> float:
        return cut(known.sizes, model.full)

    sure = sorted((known for known in tried if surely(known, least)), key=cut_of)
    if sure:
        return none_larger(known.sizes for known in sure)
    fast = [known for known in tried if known.ratio <= 1 / least]
    best = min(fast, key=cut_of) if fast else min(tried, key=lambda known: known.ratio)
    return [best.sizes]


def surely(known: Timed, gain: float) -> bool:
    """Whether the whole interval is faster."""
    high = known.interval[1]
    return high is not None and high < 1 / gain


def _refuse_unreachable(table: Table, model: Model, gain: float, least: float) -> None:
    smallest = next((t for t in table.entries if t.sizes == model.smallest), None)
    if smallest is None or smallest.ratio > 1 / least:
        best = 1.0 if smallest is None else 1 / smallest.ratio
        raise RecipeError(
            f"{gain:g}, and the smallest model that these methods make is {best:.2f} times as fast "
            "on this machine as what it is timed beside (reduce.gain_over)",
            where="reduce.goal.latency_gain",
            accepted=f"up to {best:.2f}" if best > 1 else "",
            fix="Ask for less, or add to reduce.methods.",
        )


def refuse_reached(whole: Timed, section: Reduce) -> None:
    """Raise RecipeError where the whole model in the target's form surely is as fast as the goal
    asks of a smaller one. whole: beside it in float."""
    gain = section.latency_gain
    assert gain is not None
    if surely(whole, gain):
        raise RecipeError(
            f"{gain:g}, and the whole model in the target's form is already {1 / whole.ratio:.2f} "
            "times as fast as in float on this machine",
            where="reduce.goal.latency_gain",
            accepted=f"from {1 / whole.ratio:.2f}",
            fix="Leave out reduce, or ask for more.",
        )


def candidates(folder: Path) -> list[Sizes]:
    """Of which reduce is to make one, as the latencies stage wrote them."""
    return [Sizes(**sizes) for sizes in read_json(folder / TABLE)["candidates"]]
