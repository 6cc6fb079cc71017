"""ALBERT: one block of weights applied several times; what is chosen must suit every use."""

from __future__ import annotations

from pathlib import Path

import torch

from optimizer.compress.simulate import simulate_state
from optimizer.compress.walk import blocks as walk
from optimizer.foundation import state
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model
from optimizer.recipe.schema import Activations
from tests.compress.checkpoints import compress, modules

QUERY = "encoder.albert_layer_groups.0.albert_layers.0.attention.query"


def test_the_shared_weights_are_quantized_once(loaded_albert: Path, tmp_path: Path) -> None:
    out = compress(loaded_albert, tmp_path / "out", activations=Activations(range="minmax"))
    made = state.read(out)
    assert len(made.weights) == 6
    assert modules(out)["encoder.embedding_hidden_mapping_in"]["scheme"] == "float"


def test_a_range_covers_what_every_use_sees(loaded_albert: Path, tmp_path: Path) -> None:
    out = compress(
        loaded_albert, tmp_path / "out", activations=Activations(range="minmax"), batch_size=12
    )
    covered = state.read(out).ranges[f"{QUERY}:input"]
    model = load_torch_model(open_checkpoint(loaded_albert), "sentence-embedding")
    uses: list[tuple[float, float]] = []
    with (
        torch.no_grad(),
        walk.observed(model, [QUERY], lambda _n, x: uses.append((float(x.min()), float(x.max())))),
    ):
        model(torch.arange(5, 30)[None], torch.ones(1, 25, dtype=torch.long))
    assert len(uses) == 3
    assert len(set(uses)) == 3
    width = covered.high - covered.low
    assert all(low > covered.low - 0.3 * width for low, _ in uses)
    assert all(high < covered.high + 0.3 * width for _, high in uses)


def test_the_simulated_model_stays_close(loaded_albert: Path, tmp_path: Path) -> None:
    out = compress(loaded_albert, tmp_path / "out", activations=Activations(range="minmax"))
    model = load_torch_model(open_checkpoint(loaded_albert), "sentence-embedding")
    tokens = torch.arange(5, 30)[None]
    with torch.no_grad():
        exact, coded = model(tokens)[0], simulate_state(model, state.read(out))(tokens)[0]
    assert float((exact - coded).norm() / exact.norm()) < 0.1


def test_uses_of_one_block_stay_in_one_segment() -> None:
    def uses(names: str) -> list[walk.BlockUse]:
        return [walk.BlockUse(n, (), {}) for n in names]

    assert walk.split_segments(uses("abc")) == [range(1), range(1, 2), range(2, 3)]
    assert walk.split_segments(uses("aabb")) == [range(2), range(2, 4)]
    assert walk.split_segments(uses("abab")) == [range(4)]
    assert walk.split_segments(uses("abcbd")) == [range(1), range(1, 4), range(4, 5)]
