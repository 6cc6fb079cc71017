"""Find the numbers of neurons, heads and blocks that meet a goal."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from optimizer.foundation.errors import RecipeError
from optimizer.recipe.reduce import Goal


@dataclass(frozen=True)
class Sizes:
    """Number of blocks, and of neurons and key/value heads in each block, that a smaller model
    keeps."""

    blocks: int
    ffn: int
    heads: int

    def __str__(self) -> str:
        parts = [f"{self.blocks} blocks"]
        parts += [f"{self.ffn} neurons"] if self.ffn else []
        parts += [f"{self.heads} key/value heads"] if self.heads else []
        return ", ".join(parts)


@dataclass(frozen=True)
class SizeChoices:
    """Sizes of a model, and the sizes that may be chosen for it.

    full: sizes of the unreduced model
    each_ffn, each_heads: weights of one neuron and of one key/value head; shared weights count once
    fixed: other weights of a block
    outside: weights outside the blocks
    blocks, ffn, heads: numbers that may be chosen, in any order
    """

    full: Sizes
    each_ffn: int
    each_heads: int
    fixed: int
    outside: int
    blocks: Sequence[int]
    ffn: Sequence[int]
    heads: Sequence[int]

    @property
    def smallest(self) -> Sizes:
        return Sizes(min(self.blocks), min(self.ffn), min(self.heads))

    def in_blocks(self, sizes: Sizes) -> int:
        """Return the number of parameters in the blocks of a model of these sizes."""
        per_block = self.fixed + sizes.ffn * self.each_ffn + sizes.heads * self.each_heads
        return sizes.blocks * per_block

    def parameters(self, sizes: Sizes) -> int:
        """Return the number of parameters of a model of these sizes."""
        return self.outside + self.in_blocks(sizes)


def solve(goal: Goal, model: SizeChoices) -> Sizes:
    """Find the sizes within the goal with the least and most even cut: the smallest sum of squared
    logarithms of the shares kept. Shares multiply, so their logarithms add up; the square keeps the
    cuts even. (latency_table.py handles a latency gain.)

    Raises RecipeError with the smallest possible model where none is within the goal.
    """
    if goal.depth is not None:
        return _deep(goal.depth, model)
    limit = goal.parameters or 0.0
    if goal.keep is not None:
        limit = model.outside + goal.keep * model.in_blocks(model.full)
    best = find_least_cut(model, lambda sizes: model.parameters(sizes) <= limit)
    if best is None:
        least = model.smallest
        share = model.in_blocks(least) / model.in_blocks(model.full)
        raise RecipeError(
            f"the smallest model that these methods make has {model.parameters(least):,} "
            f"parameters, {share:.3f} of the weights in the blocks",
            where="reduce.goal",
            accepted=f"parameters from {model.parameters(least):,}, keep from {share:.3f}",
            fix="Keep more, or add to reduce.methods.",
        )
    return best


def _deep(depth: int, model: SizeChoices) -> Sizes:
    if depth not in model.blocks:
        raise RecipeError(
            f"{depth} blocks, and the model has {model.full.blocks}",
            where="reduce.goal.depth",
            accepted=f"1 to {model.full.blocks}",
        )
    return Sizes(depth, model.full.ffn, model.full.heads)


def find_least_cut(model: SizeChoices, fits: Callable[[Sizes], bool]) -> Sizes | None:
    """Return the sizes that fit the goal and cut off least of the model; None where none fit.

    fits: predicate on sizes; if it is True for sizes, it is True for all smaller ones
    """
    return min(_fitting(fits, model), key=lambda s: cut(s, model.full), default=None)


def find_largest(model: SizeChoices, fits: Callable[[Sizes], bool]) -> list[Sizes]:
    """Return the sizes that fit the goal while no larger ones do, the least reduced first."""
    return sorted(drop_smaller(_fitting(fits, model)), key=lambda s: cut(s, model.full))


def drop_smaller(sizes: Iterable[Sizes]) -> list[Sizes]:
    """Return the sizes of smaller models that are not dominated: no other equals or exceeds them in
    every number. The order stays."""
    distinct = [*dict.fromkeys(sizes)]
    largest: list[Sizes] = []
    for s in sorted(distinct, key=lambda s: (s.blocks, s.ffn, s.heads), reverse=True):
        if not any(k.blocks >= s.blocks and k.ffn >= s.ffn and k.heads >= s.heads for k in largest):
            largest.append(s)  # later ones have less of something
    return [s for s in distinct if s in largest]


def find_widest(
    model: SizeChoices, fits: Callable[[Sizes], bool], blocks: int, heads: int
) -> Sizes | None:
    """Return the sizes with the most neurons that fit the goal, for given numbers of blocks and
    heads; None where none fit."""
    widths = sorted(model.ffn)
    sizes = [Sizes(blocks, ffn, heads) for ffn in widths]
    fitting = bisect_left(sizes, True, key=lambda s: not fits(s))
    return sizes[fitting - 1] if fitting else None


def _fitting(fits: Callable[[Sizes], bool], model: SizeChoices) -> Iterator[Sizes]:
    """Yield the sizes with the most neurons that fit the goal, for each number of blocks and
    heads."""
    for blocks, heads in product(model.blocks, model.heads):
        sizes = find_widest(model, fits, blocks, heads)
        if sizes is not None:
            yield sizes


def cut(sizes: Sizes, full: Sizes) -> float:
    """Measure how much sizes cut off a model that is reduced: the sum of squared logarithms of the
    shares kept; 0: nothing is removed."""
    shares = (
        (sizes.blocks, full.blocks),
        (sizes.ffn, full.ffn),
        (sizes.heads, full.heads),
    )
    return sum(math.log(kept / all_) ** 2 for kept, all_ in shares if all_)
