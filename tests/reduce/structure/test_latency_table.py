"""Sizes follow from a table of times as they must where times are what the table takes them for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from optimizer.foundation.errors import RecipeError
from optimizer.recipe.reduce import Goal, Reduce
from optimizer.reduce.structure.latency_table import (
    LatencyTable,
    TimedSize,
    choose,
    list_grid,
    refuse_reached,
)
from optimizer.reduce.structure.sizes import SizeChoices, Sizes, cut

FULL = Sizes(6, 1536, 8)
OUTSIDE = 0.1
Law = Callable[[Sizes], float]
"""Sizes -> their time over the whole model's."""


def model(blocks: bool = True, heads: bool = True) -> SizeChoices:
    return SizeChoices(
        full=FULL,
        each_ffn=768,
        each_heads=100_000,
        fixed=10_000,
        outside=12_000_000,
        blocks=range(1, 7) if blocks else (6,),
        ffn=range(8, 1537, 8),
        heads=(1, 2, 4, 8) if heads else (8,),
    )


def linear(sizes: Sizes) -> float:
    """Ratio in the table's model of time: half of a block is neurons, and 0.3 heads."""
    block = 0.2 + 0.5 * sizes.ffn / FULL.ffn + 0.3 * sizes.heads / FULL.heads
    return OUTSIDE + (1 - OUTSIDE) * sizes.blocks / FULL.blocks * block


def timed(sizes: Sizes, law: Law = linear, width: float = 0.002) -> TimedSize:
    ratio = law(sizes)
    return TimedSize(sizes, ratio, (ratio - width / 2, ratio + width / 2))


def table(of: SizeChoices, law: Law = linear) -> LatencyTable:
    return LatencyTable(of.full, tuple(timed(sizes, law) for sizes in list_grid(of)))


def asks(gain: float) -> Reduce:
    return Reduce(goal=Goal(latency_gain=gain), methods=("width", "depth"))


@pytest.mark.parametrize("sizes", [FULL, Sizes(6, 1000, 8), Sizes(3, 600, 4), Sizes(1, 8, 1)])
def test_times_that_are_linear_are_predicted(sizes: Sizes) -> None:
    known = table(model())
    assert known.outside == pytest.approx(OUTSIDE)
    assert known.ratio(sizes) == pytest.approx(linear(sizes))


@pytest.mark.parametrize(
    ("gain", "blocks"), [(1.13, True), (1.6, True), (2.57, True), (4.9, True), (1.6, False)]
)
def test_the_goal_is_met_and_not_by_any_larger_size(gain: float, blocks: bool) -> None:
    of = model(blocks, heads=False)
    candidates, confirmed = choose(table(of), of, asks(gain), timed)
    for sizes in candidates:
        assert linear(sizes) <= 1 / gain
        for larger in (replace(sizes, ffn=sizes.ffn + 8), replace(sizes, blocks=sizes.blocks + 1)):
            there = larger.ffn in of.ffn and larger.blocks in of.blocks
            assert not there or linear(larger) > 1 / gain
    assert {known.sizes for _, known in confirmed} == {*candidates}


def test_several_numbers_of_blocks_go_on_the_least_cut_first() -> None:
    of = model(heads=False)
    candidates, _ = choose(table(of), of, asks(1.6), timed)
    blocks = [sizes.blocks for sizes in candidates]
    assert len({*blocks}) == len(blocks) > 1
    assert candidates == sorted(candidates, key=lambda s: cut(s, FULL))


def test_whole_blocks_alone_have_one_answer() -> None:
    """Fewer of them are faster, and nothing speaks for them."""
    of = replace(model(heads=False), ffn=(1536,))
    candidates, confirmed = choose(table(of), of, asks(1.6), timed)
    assert len(candidates) == len(confirmed) == 1


def test_smaller_sizes_are_never_predicted_to_be_slower() -> None:
    """Also where noise made one so."""

    def noisy(sizes: Sizes) -> float:
        return linear(sizes) + 0.3 * (sizes.ffn == 1088) - 0.2 * (sizes.heads == 4)

    known = table(model(), noisy)
    ratios = [known.ratio(Sizes(6, ffn, 8)) for ffn in range(8, 1537, 8)]
    assert ratios == sorted(ratios)
    assert ratios[-1] == 1
    assert known.ratio(Sizes(6, 1536, 2)) <= known.ratio(Sizes(6, 1536, 4)) <= 1


def test_a_goal_out_of_reach_is_refused_with_what_can_be_reached() -> None:
    of = model()
    most = 1 / linear(of.smallest)
    with pytest.raises(RecipeError, match=rf"the smallest model .* is {most:.2f} times as fast"):
        choose(table(of), of, asks(1.1 * most), timed)


def test_nothing_to_leave_out_is_refused() -> None:
    of = replace(model(), blocks=(6,), ffn=(1536,), heads=(8,))
    assert list_grid(of) == ()
    with pytest.raises(RecipeError, match=r"is 1\.00 times as fast"):
        choose(table(of), of, asks(1.5), timed)


@pytest.mark.parametrize("more", [-0.5, 0.5])
def test_what_is_built_corrects_a_table_that_was_wrong(more: float) -> None:
    """Fewer blocks and fewer neurons together save less or more than each did alone."""

    def together(sizes: Sizes) -> float:
        both = (1 - sizes.blocks / FULL.blocks) * (1 - sizes.ffn / FULL.ffn)
        return linear(sizes) + more * both

    of, gain = model(), 1.6
    candidates, confirmed = choose(table(of, linear), of, asks(gain), lambda s: timed(s, together))
    assert all(1 / together(sizes) > 1.52 for sizes in candidates)
    assert 1 / together(candidates[0]) < 1.68
    assert len(candidates) < len(confirmed) <= 8


def test_a_gain_over_float_needs_less_where_quantization_gives_the_rest() -> None:
    """All times are shares of the float model's; the whole quantized one takes 0.5."""
    of = model()

    def shared(sizes: Sizes) -> float:
        return 0.5 * linear(sizes)

    known = replace(table(of, shared), whole=0.5)
    assert known.ratio(Sizes(3, 600, 4)) == pytest.approx(shared(Sizes(3, 600, 4)))
    over, _ = choose(known, of, asks(3.2), lambda s: timed(s, shared))
    same, _ = choose(table(of), of, asks(1.6), timed)
    assert over == same


def test_nothing_is_left_out_where_quantization_alone_reaches_the_goal() -> None:
    with pytest.raises(RecipeError, match=r"already 2\.00 times as fast .* Remove reduce"):
        refuse_reached(TimedSize(FULL, 0.5, (0.49, 0.51)), asks(1.9))


@pytest.mark.parametrize("interval", [(0.48, 0.53), (None, None)])
def test_what_may_be_noise_is_no_reason_to_leave_reduce_out(
    interval: tuple[float | None, float | None],
) -> None:
    """(1 / 1.9 is 0.526.)"""
    refuse_reached(TimedSize(FULL, 0.5, interval), asks(1.9))


@pytest.mark.parametrize("floor", [0.0, 0.9])
def test_no_more_is_built_than_a_few_where_none_is_sure(floor: float) -> None:
    """As on a machine that is too busy to tell: the least cut that seemed fast enough, else the
    fastest."""
    of = model()
    (sizes,), confirmed = choose(
        table(of), of, asks(1.6), lambda s: TimedSize(s, max(floor, linear(s)), (None, None))
    )
    tried = [known for _, known in confirmed]
    fast = [known.sizes for known in tried if known.ratio <= 1 / 1.52]
    assert 1 <= len(confirmed) <= 8
    if fast:
        assert sizes == min(fast, key=lambda s: cut(s, FULL))
    else:
        assert sizes == min(tried, key=lambda k: k.ratio).sizes
    assert bool(fast) == (floor == 0)
