"""A learned norm weight is bounded around its value after folding."""

from __future__ import annotations

import torch

from optimizer.foundation.state import CompressedState
from optimizer.model.architectures.families import FAMILIES
from optimizer.validate.ledger.laws import state_laws

NORM = "model.layers.0.input_layernorm.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"
GENERATOR = torch.Generator().manual_seed(0)
SOURCE = {
    NORM: 1 + 0.2 * torch.randn(16, generator=GENERATOR),
    QUERY: torch.randn(8, 16, generator=GENERATOR),
}
LLAMA = FAMILIES["llama"]


def broken(gain: torch.Tensor, weight: torch.Tensor | None = None, rotated: bool = False) -> int:
    replaced = {NORM: gain} if weight is None else {NORM: gain, QUERY: weight}
    state = CompressedState({}, replaced=replaced)
    return len(state_laws.judge_norm_weights(state, SOURCE, LLAMA, rotated, limit=0.25))


def test_a_gain_may_move_a_little_and_not_far() -> None:
    assert not broken(SOURCE[NORM] + 0.1)
    assert broken(SOURCE[NORM] + 0.5)


def test_what_was_folded_into_the_weights_counts_for_the_gain() -> None:
    factor = torch.linspace(0.5, 2.0, 16)
    folded, weight = SOURCE[NORM] / factor, SOURCE[QUERY] * factor
    assert not broken(folded + 0.05, weight)
    assert broken(folded)
    assert broken(SOURCE[NORM], weight)


def test_a_rotation_leaves_gains_of_one() -> None:
    assert not broken(torch.ones(16) + 0.1, rotated=True)
    assert broken(2 * torch.ones(16), rotated=True)
