"""The profile for a shape, and the range that a shape left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimizer.harness.errors import InputError
from optimizer.harness.runtimes.trt.profiles import Profile, choose

SHORT: Profile = {"ids": ((1, 1), (1, 16), (8, 64))}
LONG: Profile = {"ids": ((1, 32), (8, 128), (32, 256))}


@pytest.mark.parametrize(
    ("shape", "profile"), [((1, 16), 0), ((4, 20), 0), ((8, 64), 1), ((9, 64), 1), ((1, 256), 1)]
)
def test_of_profiles_that_take_a_shape_the_nearest_middle_is_chosen(
    shape: tuple[int, int], profile: int
) -> None:
    assert choose([SHORT, LONG], {"ids": shape}) == profile


@given(st.integers(1, 40), st.integers(1, 300))
def test_what_is_chosen_takes_the_shape_and_a_refusal_means_none_does(
    batch: int, length: int
) -> None:
    def takes(profile: Profile) -> bool:
        low, _, high = profile["ids"]
        return low[0] <= batch <= high[0] and low[1] <= length <= high[1]

    shapes = {"ids": (batch, length)}
    if any(map(takes, (SHORT, LONG))):
        assert takes((SHORT, LONG)[choose([SHORT, LONG], shapes)])
    else:
        with pytest.raises(InputError):
            choose([SHORT, LONG], shapes)


def test_the_input_the_axis_and_the_range_are_named() -> None:
    with pytest.raises(InputError, match=r"input ids: axis 1 is 65 .*Accepted: 1 to 64\."):
        choose([SHORT], {"ids": (1, 65)})


def test_of_several_profiles_the_nearest_to_taking_it_is_told() -> None:
    with pytest.raises(InputError, match=r"axis 1 is 300 .*32 to 256 \(profile 1 of 2\)"):
        choose([SHORT, LONG], {"ids": (16, 300)})


def test_another_number_of_axes_is_told_with_the_ranges() -> None:
    with pytest.raises(InputError, match=r"shape \[4\].*1 to 8.*1 to 64"):
        choose([SHORT], {"ids": (4,)})
