"""Calibration text that the model generates."""

from __future__ import annotations

from pathlib import Path

import torch

from optimizer.compress.data.own_text import LONGEST, PROMPT, _sample_token, generate
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model
from tests.compress.checkpoints import load


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    chances = torch.tensor([0.0, 0.2, 0.0, 0.5, 0.3, 0.0])
    drawn = _sample_token(chances.repeat(20_000, 1), torch.Generator().manual_seed(0))
    shares = torch.bincount(drawn[:, 0], minlength=6) / 20_000
    assert torch.allclose(shares, chances, atol=0.02)
    assert bool((shares[chances == 0] == 0).all())


def test_windows_begin_with_given_text_and_depend_on_the_seed_alone(
    tiny_llama: Path, tmp_path: Path
) -> None:
    source = load(tiny_llama, tmp_path / "load", "text-generation")
    given = torch.arange(5, 45).repeat(3, 1) + torch.tensor([[0], [1], [2]])
    one, again, other = (
        generate(load_torch_model(open_checkpoint(source), "text-generation"), given, 4, seed)
        for seed in (0, 0, 1)
    )
    assert one.shape == (4, 40)
    assert LONGEST > 40
    starts = {tuple(row[i : i + PROMPT].tolist()) for row in given for i in range(40 - PROMPT)}
    assert all(tuple(window[:PROMPT].tolist()) in starts for window in one)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
