"""Progress of a build, from its nested phases."""

from hypothesis import given
from hypothesis import strategies as st

from optimizer.harness.runtimes.trt.build.watch import PARTS, Advance


def test_an_inner_phase_fills_one_step_of_the_outer() -> None:
    made = Advance()
    made.start("outer", 4)
    made.step("outer", 1)
    made.start("inner", 2)
    assert made.step("inner", 1) == PARTS * (1 + 1 / 2) / 4


def test_a_phase_left_early_counts_as_done() -> None:
    made = Advance()
    made.start("outer", 2)
    made.start("inner", 100)
    made.finish("inner")
    assert made.step("outer", 1) == PARTS / 2
    assert made.finish("outer") == PARTS


def test_what_comes_before_a_slow_phase_is_worth_little() -> None:
    made = Advance("slow")
    made.start("outer", 2)
    before = made.step("outer", 1)
    made.start("slow", 1)
    assert made.finish("slow") > 4 * before > 0
    assert made.finish("outer") == PARTS


@given(st.lists(st.tuples(st.sampled_from(["start", "step", "finish"]), st.integers(0, 9))))
def test_what_is_told_never_goes_back(events: list[tuple[str, int]]) -> None:
    made, told = Advance(), [0]
    for kind, number in events:
        phase = f"phase {number % 3}"
        if kind == "start":
            told.append(made.start(phase, number))
        else:
            told.append(made.step(phase, number) if kind == "step" else made.finish(phase))
    assert told == sorted(told)
    assert told[-1] <= PARTS
