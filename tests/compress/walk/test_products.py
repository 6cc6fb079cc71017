"""float32 or bf16, by which is faster here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from optimizer.compress.walk import products
from optimizer.compress.walk.products import ProductSettings


@pytest.mark.parametrize(
    ("bf16", "faster"), [([1.0, 1.9], True), ([1.0, 2.0], False), ([3.0, 4.0], False)]
)
def test_bf16_is_faster_when_its_slowest_is_faster_than_float32s_fastest(
    bf16: list[float], faster: bool
) -> None:
    assert products.bf16_is_faster({"fp32": [2.0, 3.0], "bf16": bf16}) == faster


def test_both_are_computed_in_turn_and_the_first_warms_up() -> None:
    seen: list[torch.dtype] = []
    seconds = products.time_in_turns(seen.append)
    assert seen == [torch.float32, torch.bfloat16] * (1 + products.TIMED)
    assert {n: len(s) for n, s in seconds.items()} == dict.fromkeys(products.TYPES, products.TIMED)


def test_a_walk_that_goes_on_computes_as_it_did(tmp_path: Path) -> None:
    first = products.choose("auto", (64, 64), tmp_path, "compress")
    assert set(first.seconds) == set(products.TYPES)
    other = ProductSettings("bf16" if first.precision == "fp32" else "fp32", first.seconds)
    products.store_choice(other, tmp_path, "compress: a product")
    assert products.choose("auto", (64, 64), tmp_path, "compress") == other


def test_what_the_recipe_says_is_not_timed(tmp_path: Path) -> None:
    for precision in ("fp32", "bf16"):
        assert products.choose(precision, (64, 64), tmp_path, "x") == ProductSettings(precision, {})
    assert not list(tmp_path.iterdir())
