"""Folded batch norms equal the modules' own computation, for any values."""

from __future__ import annotations

import pytest
from torch import Tensor, nn
from transformers import AutoModelForImageClassification, AutoModelForObjectDetection

from optimizer.model.architectures.residual_blocks import BatchNorms
from optimizer.model.checkpoint.batch_norms import fold
from optimizer.validate.ledger.laws import batch_norm_laws
from tests.vision import config, write


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> nn.Module:
    source = write(tmp_path_factory.mktemp("norms") / "regnet", "regnet")
    model: nn.Module = AutoModelForImageClassification.from_pretrained(source).eval()
    for i, norm in enumerate(m for m in model.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.running_var *= 10.0 ** (i - 6)  # type: ignore[operator]
        norm.running_mean *= 10.0 ** (6 - i)  # type: ignore[operator]
    return model


def ours(theirs: nn.Module, epsilon: float) -> dict[str, Tensor]:
    state, found = theirs.state_dict(), {}
    for name in [n for n in state if n.endswith(".convolution.weight")]:
        path = name.removesuffix("convolution.weight")
        norm = {k.rpartition(".")[2]: t for k, t in state.items() if f"{path}normalization." in k}
        values = fold(state[name], state.get(f"{path}convolution.bias"), norm, epsilon)
        found |= dict(zip((name, f"{path}convolution.bias"), values, strict=True))
    return found


def test_what_is_folded_right_passes(theirs: nn.Module) -> None:
    assert batch_norm_laws.compare_folded(theirs, ours(theirs, 1e-5), BatchNorms()) == []


@pytest.mark.parametrize("epsilon", [0.0, 9e-6, 1e-3])
def test_another_epsilon_is_named(theirs: nn.Module, epsilon: float) -> None:
    assert batch_norm_laws.compare_folded(theirs, ours(theirs, epsilon), BatchNorms())


def test_another_epsilon_than_that_of_a_frozen_norm_is_named() -> None:
    detector: nn.Module = AutoModelForObjectDetection.from_config(config("detr")).eval()
    assert batch_norm_laws.compare_folded(detector, ours(detector, 1e-5), BatchNorms()) == []
    assert batch_norm_laws.compare_folded(detector, ours(detector, 9e-6), BatchNorms())


def test_one_channel_is_named(theirs: nn.Module) -> None:
    values = ours(theirs, 1e-5)
    name = "regnet.encoder.stages.0.layers.0.layer.1.convolution.bias"
    values[name][3] *= 1 + 2.0**-20
    (problem,) = batch_norm_laws.compare_folded(theirs, values, BatchNorms())
    assert problem.startswith(name)
