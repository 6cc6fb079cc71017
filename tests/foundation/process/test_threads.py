"""Items are computed in order, each on one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from optimizer.foundation.process import threads


@pytest.fixture(autouse=True)
def _two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_each_item_is_computed_on_one_thread_and_the_number_is_restored() -> None:
    made = list(threads.map_in_threads(lambda i: (i, torch.get_num_threads()), range(5)))
    assert made == [(i, 1) for i in range(5)]
    assert torch.get_num_threads() == 2


def test_an_error_is_raised_and_the_number_is_restored() -> None:
    with pytest.raises(ZeroDivisionError):
        list(threads.map_in_threads(lambda i: 1 // i, [1, 0]))
    assert torch.get_num_threads() == 2
