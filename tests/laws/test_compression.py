"""Laws that tie the stage's state to the model it came from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from optimizer.compress.simulate import (
    QuantLinear,
    fake_quantize,
    fake_quantize_per_token,
    simulate_state,
)
from optimizer.foundation import state
from optimizer.foundation.errors import CheckpointError
from optimizer.foundation.state import CompressedState, Range
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model
from optimizer.recipe.schema import Activations
from tests.compress.checkpoints import W8A8, compress, modules
from tests.compress.conftest import loaded, static  # noqa: F401 (fixtures)
from tests.conftest import heavy_tailed

TOKENS = torch.arange(5, 45).reshape(2, 20)


def run(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(TOKENS)[0]  # type: ignore[no-any-return]


def distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.fixture(scope="module")
def model(loaded: Path) -> nn.Module:  # noqa: F811
    return load_torch_model(open_checkpoint(loaded), "sentence-embedding")


@pytest.fixture(scope="module")
def folded(loaded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """Smoothed at a fixed strength, everywhere, no biases corrected."""
    out = tmp_path_factory.mktemp("folded") / "out"
    return compress(loaded, out, method="smoothquant", strength=0.5, **W8A8)


def test_the_folded_float_model_is_the_original(
    loaded: Path,  # noqa: F811
    folded: Path,
    model: nn.Module,
) -> None:
    replaced = state.read(folded).replaced
    assert replaced
    twin = load_torch_model(open_checkpoint(loaded), "sentence-embedding", overrides=replaced)
    assert distance(run(twin), run(model)) < 1e-5


def test_a_factor_and_the_inverse_in_the_codes_cancel(folded: Path, model: nn.Module) -> None:
    made = state.read(folded)
    for site, factor in made.factors.items():
        name = site.removesuffix(":input") + ".weight"
        values = made.weights[name].dequantize() * factor
        exact = made.replaced.get(name, model.get_parameter(name))
        assert distance(values, exact) < 0.02
        assert distance(values / factor, exact) > 0.02


def test_every_module_simulated_is_the_walk_s_own_result(
    static: Path,  # noqa: F811
    model: nn.Module,
) -> None:
    error = distance(run(simulate_state(model, state.read(static))), run(model))
    assert 0 < error < 0.1


def test_simulating_leaves_the_float_model_as_it_was(
    static: Path,  # noqa: F811
    model: nn.Module,
) -> None:
    before = run(model)
    twin = simulate_state(model, state.read(static))
    assert torch.equal(run(model), before)
    assert not torch.equal(run(twin), before)
    embeddings = "embeddings.word_embeddings.weight"
    assert twin.get_parameter(embeddings) is model.get_parameter(embeddings)


def test_simulating_no_module_gives_the_float_model_back(folded: Path, model: nn.Module) -> None:
    assert distance(run(simulate_state(model, state.read(folded), only=())), run(model)) < 1e-5


def test_simulating_some_modules_lies_between_none_and_all(folded: Path, model: nn.Module) -> None:
    made = state.read(folded)
    some = [n.removesuffix(".weight") for n in made.weights if ".1." in n]
    few = distance(run(simulate_state(model, made, only=some)), run(model))
    assert 1e-4 < few < distance(run(simulate_state(model, made)), run(model))


def test_without_activations_only_the_weights_err(folded: Path, model: nn.Module) -> None:
    made = state.read(folded)
    weights_only = distance(run(simulate_state(model, made, activations=False)), run(model))
    assert 0 < weights_only < distance(run(simulate_state(model, made)), run(model))


def test_a_state_of_another_model_is_refused(model: nn.Module) -> None:
    stray = CompressedState({}, {"nowhere.bias": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"nowhere\.bias"):
        simulate_state(model, stray)


def test_correcting_biases_removes_the_mean_error(
    loaded: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    coarse = {"activations": Activations(range="minmax")}
    plain = modules(compress(loaded, tmp_path / "a", **coarse))
    corrected = modules(compress(loaded, tmp_path / "b", bias_correction=True, **coarse))
    first = "encoder.layer.0."
    rows = [m for m in plain if m.startswith(first)]
    assert all(corrected[m]["output_error"] <= plain[m]["output_error"] * 1.02 for m in rows)
    assert sum(corrected[m]["output_error"] < plain[m]["output_error"] for m in rows) >= 4


def test_a_static_code_is_a_projection_onto_256_values() -> None:
    x, covered = heavy_tailed((400, 8), 1, 2.0), Range(-1.0, 3.0)
    once = fake_quantize(x, covered)
    assert torch.equal(fake_quantize(once, covered), once)
    assert len(once.unique()) <= 256
    inside = (x > -0.99) & (x < 2.98)
    assert float((x - once)[inside].abs().max()) <= 0.5001 * covered.scale
    assert not fake_quantize(torch.zeros(1), covered).any()


def test_a_token_s_code_depends_on_that_token_alone() -> None:
    x = heavy_tailed((6, 32), 2)
    x[3] = 0
    assert torch.equal(fake_quantize_per_token(x)[2], fake_quantize_per_token(x[2:3] * 1.0)[0])
    assert not fake_quantize_per_token(x)[3].any()
    error = (x - fake_quantize_per_token(x)).abs().amax(-1)
    assert bool((error <= 0.5001 * x.abs().amax(-1) / 127).all())


def test_moving_values_into_the_range_leaves_the_others_as_they_are() -> None:
    x, factor = heavy_tailed((50, 4), 3, 2.0), torch.tensor([1.0, 3.0, 0.5, 0.1])
    q = QuantLinear(torch.eye(4), None, "tensor", Range(-1.0, 1.0), factor)
    moved, outside = q.within(x), (x * factor).abs() > 1.01
    assert torch.equal(moved[~((x * factor).abs() > 0.99)], x[~((x * factor).abs() > 0.99)])
    assert bool((moved[outside] * factor.expand_as(x)[outside]).abs().le(1.01).all())
    assert q.clipped(x) >= int(outside.sum())
    assert q.clipped(moved) == 0


def test_searched_smoothing_lowers_the_output_error(
    loaded: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    plain = modules(compress(loaded, tmp_path / "a", **W8A8))
    smoothed = modules(compress(loaded, tmp_path / "b", method="smoothquant", **W8A8))
    rows = [m for m in plain if plain[m]["output_error"] is not None]
    better = [smoothed[m]["output_error"] < 0.95 * plain[m]["output_error"] for m in rows]
    assert sum(better) >= 0.75 * len(rows)
