"""A trained linear computes as its compressed state, before and after training."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from optimizer.compress.simulate import simulate_state
from optimizer.foundation import state as states
from optimizer.foundation.qtensor import Scheme, quantize
from optimizer.foundation.state import CompressedState
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model
from optimizer.reduce.learn.trained_linear import Trained, TrainedLinear, make_trainable
from tests.compress import checkpoints
from tests.compress.conftest import loaded as loaded
from tests.compress.conftest import static as static
from tests.conftest import heavy_tailed

INPUTS = torch.randint(5, 90, (3, 11), generator=torch.Generator().manual_seed(0))
EMBEDDINGS = {
    *(f"embeddings.{n}_embeddings.weight" for n in ("word", "position", "token_type")),
    *(f"embeddings.LayerNorm.{n}" for n in ("weight", "bias")),
}
NOTHING = CompressedState({})
OPTIONS: dict[str, dict[str, Any]] = {
    "static, smoothed": {"method": "smoothquant", "bias_correction": True, **checkpoints.W8A8},
    "weight-only": {"method": "rtn"},
}


@pytest.fixture(scope="module", params=OPTIONS)
def folders(
    request: pytest.FixtureRequest, loaded: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    out = tmp_path_factory.mktemp("compressed") / "out"
    return loaded, checkpoints.compress(loaded, out, **OPTIONS[request.param])


def answer(model: Any) -> torch.Tensor:
    with torch.no_grad():
        hidden: torch.Tensor = model(input_ids=INPUTS).last_hidden_state
    return hidden


def disturb(parameters: Iterable[torch.nn.Parameter]) -> None:
    """As if they had been trained."""
    with torch.no_grad():
        for i, p in enumerate(parameters):
            p += heavy_tailed(tuple(p.shape), i, 0.02)


def test_before_the_first_step_it_is_the_state_to_the_bit(folders: tuple[Path, Path]) -> None:
    source, compressed = folders
    model = load_torch_model(open_checkpoint(source), "sentence-embedding")
    state = states.read(compressed)
    assert torch.equal(
        answer(make_trainable(model, state, EMBEDDINGS).model), answer(simulate_state(model, state))
    )


def test_what_was_trained_is_the_state_that_is_written(folders: tuple[Path, Path]) -> None:
    source, compressed = folders
    model = load_torch_model(open_checkpoint(source), "sentence-embedding")
    before = answer(model)
    learned = make_trainable(model, states.read(compressed), EMBEDDINGS)
    disturb(learned.parameters.values())
    base = load_torch_model(open_checkpoint(source), "sentence-embedding", overrides=learned.values)
    assert torch.equal(answer(simulate_state(base, learned.state)), answer(learned.model))
    assert torch.equal(answer(model), before)


def test_a_pruned_weight_stays_zero_whatever_the_gradient(loaded: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight = heavy_tailed((8, 16), 0)
    weight[:, ::2] = 0
    q = quantize(weight, torch.full((8, 1), 2.0**-6), None, Scheme(8))
    kept = q.integers != 0
    linear = TrainedLinear(None, q, None, None, kept=kept)
    linear(torch.randn(4, 16)).square().sum().backward()
    assert linear.latent.grad is not None
    assert linear.latent.grad[~kept].abs().max() == 0
    disturb(linear.parameters())
    assert linear.quantized.integers[~kept].abs().max() == 0


def test_every_parameter_of_a_linear_takes_a_gradient(static: Path, loaded: Path) -> None:
    model = load_torch_model(open_checkpoint(loaded), "sentence-embedding")
    learned = make_trainable(model, states.read(static), EMBEDDINGS)
    for p in learned.parameters.values():
        p.requires_grad_(True)
    out: Any = learned.model(input_ids=INPUTS)
    (out.last_hidden_state * heavy_tailed(tuple(out.last_hidden_state.shape), 1)).sum().backward()
    still = [n for n, p in learned.parameters.items() if p.grad is None or not p.grad.any()]
    assert [n for n in still if "key.bias" not in n] == []  # softmax does not see a key's bias


def test_modules_that_read_one_tensor_keep_one_range(static: Path, loaded: Path) -> None:
    model = load_torch_model(open_checkpoint(loaded), "sentence-embedding")
    learned = make_trainable(model, states.read(static), EMBEDDINGS)
    disturb(learned.parameters.values())
    attention = "encoder.layer.1.attention"
    ranges = [learned.linears[f"{attention}.self.{n}"].covered for n in ("query", "key", "value")]
    assert ranges[0] == ranges[1] == ranges[2]
    assert ranges[0] != learned.linears[f"{attention}.output.dense"].covered


def test_a_step_is_that_of_most_weights() -> None:
    """Steps of a model's integers: the median, whatever a few weights have."""
    weight = heavy_tailed((16, 32), seed=4)
    few, many = Scheme(8), Scheme(4, True, "group", 8)
    scales = [torch.full((16, 4), 0.5), torch.full((16, 4), 0.25), torch.full((16, 4), 0.125)]
    linears = {
        str(i): TrainedLinear(None, quantize(weight, s, None, many), None, None)
        for i, s in enumerate(scales)
    }
    one = TrainedLinear(None, quantize(weight, torch.ones(16, 1), None, few), None, None)
    step, highest = Trained(torch.nn.Module(), {**linears, "8": one}, {}, NOTHING).step
    assert (step, highest) == (0.25, many.high)
