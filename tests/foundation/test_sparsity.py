"""Sparsity patterns: their names, and the weights that they forbid."""

from __future__ import annotations

import pytest
import torch

from optimizer.compress.methods.pruning.masks import keep_highest
from optimizer.foundation.sparsity import Pattern, describe_violation
from tests.conftest import heavy_tailed

PATTERNS = ("2:4", "1:4", "4:8", "3:5", "unstructured 0.5", "unstructured 0.37")


@pytest.mark.parametrize("text", PATTERNS)
def test_a_pattern_is_read_as_it_is_written(text: str) -> None:
    assert str(Pattern.parse(text)) == text


@pytest.mark.parametrize("text", ["4:4", "0:4", "2:64", "2/4", "unstructured", "unstructured 1"])
def test_what_is_no_pattern_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="accepted"):
        Pattern.parse(text)


@pytest.mark.parametrize("text", PATTERNS)
def test_exactly_as_many_are_pruned_in_every_group_as_the_pattern_says(text: str) -> None:
    pattern = Pattern.parse(text)
    mask = keep_highest(heavy_tailed((7, 40), 3).abs(), pattern)
    zeros = pattern.grouped(~mask).sum(-1)
    assert bool((zeros == pattern.zeros(40)).all())
    assert describe_violation(mask, pattern) == ""


@pytest.mark.parametrize("text", PATTERNS)
def test_one_weight_let_back_breaks_the_pattern(text: str) -> None:
    pattern = Pattern.parse(text)
    mask = keep_highest(heavy_tailed((7, 40), 3).abs(), pattern)
    row, column = (~mask).nonzero()[5].tolist()
    mask[row, column] = True
    assert f"row {row}" in describe_violation(mask, pattern)


def test_equal_weights_are_pruned_to_the_pattern_too() -> None:
    mask = keep_highest(torch.ones(3, 16), Pattern.parse("2:4"))
    assert bool((mask.sum(1) == 8).all())
