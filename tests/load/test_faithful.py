"""The copy that load writes is the user's model, or load fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from optimizer.foundation.errors import OptimizeError
from optimizer.load import faithful, stage, weights
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.recipe.schema import Model
from tests.load.conftest import Load

SECTION = Model(source="x", task="sentence-embedding")


def test_two_tensors_that_changed_places_are_seen(load: Load, bert: Path) -> None:
    written = dict(open_checkpoint(load(bert)).tensors)
    one, two = (f"encoder.layer.0.attention.self.{n}.weight" for n in ("query", "value"))
    written[one], written[two] = written[two], written[one]
    with pytest.raises(OptimizeError, match=r"layer\.0\.attention\.self\.(query|value)\.weight"):
        faithful.check(bert, SECTION, written)


def test_one_value_that_changed_is_seen(load: Load, bert: Path) -> None:
    written = dict(open_checkpoint(load(bert)).tensors)
    name = "encoder.layer.1.output.LayerNorm.bias"
    written[name] = written[name] + torch.tensor([1e-6] + [0.0] * 63)
    with pytest.raises(OptimizeError, match=r"layer\.1\.output\.LayerNorm\.bias"):
        faithful.check(bert, SECTION, written)


def test_the_stage_itself_checks_what_it_wrote(
    load: Load, bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = weights.SourceWeights.read

    def swapped(self: weights.SourceWeights, name: str) -> torch.Tensor:
        return honest(self, name).flip(0)

    monkeypatch.setattr(weights.SourceWeights, "read", swapped)
    with pytest.raises(OptimizeError, match="other values than transformers reads"):
        load(bert)
    assert stage.STAGE.name == "load"
