"""Channels of the hidden states are removed, and the ledger notices a wrong cut."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from optimizer import pipeline
from optimizer.foundation.errors import RecipeError
from optimizer.recipe.data import DataSpec
from optimizer.recipe.recover import Recover
from optimizer.recipe.schema import Recipe, Recovery
from optimizer.reduce.learn import recover
from optimizer.store import Store
from tests.decoders import write_tiny_decoder
from tests.reduce.smaller import copied, loaded, reduced
from tests.reduce.test_stage import output
from tests.validate.decoder_runs import decoder_recipe
from tests.validate.ledger.laws.reduce.test_structure_laws import hop

GOAL = {"goal": {"keep": 0.8}, "methods": ["hidden"]}
WEIGHTS = "checkpoint/model.safetensors"


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loaded(request.param, tmp_path_factory.mktemp(request.param))


def document(folder: Path) -> Any:
    return json.loads((folder / "reduced.json").read_text())


def test_the_narrower_checkpoint_loads_meets_its_goal_and_passes_its_hop(
    reference: Path, tmp_path: Path
) -> None:
    folder = reduced(reference, tmp_path / "out", **GOAL)
    made, tensors = document(folder), load_file(folder / WEIGHTS)
    there, kept = made["sizes"]["hidden"]
    assert kept == len(made["hidden"]) < there
    assert made["weights"]["blocks"][1] <= 0.8 * made["weights"]["blocks"][0]
    assert made["weights"]["all"][1] == sum(t.numel() for t in tensors.values())
    assert output(folder).shape == output(reference).shape
    entry = hop(reference, folder)
    assert entry.problems == ()
    assert entry.measured is not None


@pytest.mark.parametrize("importance", ["activations", "magnitude"])
def test_channels_that_are_always_zero_go_first_and_change_nothing(
    importance: str, reference: Path, tmp_path: Path
) -> None:
    """Because a norm's weights make up for the number of channels that its mean is over."""
    made = document(reduced(reference, tmp_path / "once", **GOAL, importance=importance))
    zeroed = copied(reference, tmp_path / "zeroed")
    tensors = load_file(zeroed / WEIGHTS)
    wide, kept = made["sizes"]["hidden"]
    gone = list(range(1, wide, wide // (wide - kept)))
    assert len(gone) == wide - kept
    assert {*gone} & {*made["hidden"]}
    for name, tensor in tensors.items():
        if name.endswith(("embed_tokens.weight", "lm_head.weight")):
            tensor[:, gone] = 0
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[gone] = 0
    save_file(tensors, zeroed / WEIGHTS)
    again = reduced(zeroed, tmp_path / "twice", **GOAL, importance=importance)
    assert not {*document(again)["hidden"]} & {*gone}
    change = (output(again) - output(zeroed)).norm() / output(zeroed).norm()
    assert change < 1e-5  # the norms' epsilon


def rows_shifted(t: dict[str, torch.Tensor], name: str) -> None:
    t[name] = t[name].roll(1, 0)


def columns_shifted(t: dict[str, torch.Tensor], name: str) -> None:
    t[name] = t[name].roll(1, 1)


def not_made_up_for(t: dict[str, torch.Tensor], name: str) -> None:
    t[name] *= 0.9


FAULTS: dict[str, Callable[[dict[str, torch.Tensor], str], None]] = {
    "model.layers.1.mlp.down_proj.weight": rows_shifted,
    "model.layers.0.self_attn.k_proj.weight": columns_shifted,
    "model.embed_tokens.weight": columns_shifted,
    "model.layers.2.input_layernorm.weight": not_made_up_for,
    "model.norm.weight": not_made_up_for,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name: str, reference: Path, tmp_path: Path) -> None:
    folder = reduced(reference, tmp_path / "out", **GOAL, importance="magnitude")
    tensors = load_file(folder / WEIGHTS)
    FAULTS[name](tensors, name)
    save_file(tensors, folder / WEIGHTS)
    (problem,) = hop(reference, folder).problems
    assert problem.startswith(f"{name}: differs")


def test_a_channel_off_by_one_is_named(reference: Path, tmp_path: Path) -> None:
    folder = reduced(reference, tmp_path / "out", **GOAL, importance="magnitude")
    made = document(folder)
    free = sorted({*range(made["sizes"]["hidden"][0])} - {*made["hidden"]})
    made["hidden"] = sorted([*made["hidden"][1:], free[0]])
    (folder / "reduced.json").write_text(json.dumps(made))
    assert any("embed_tokens" in problem for problem in hop(reference, folder).problems)


def test_a_model_that_cannot_be_narrower_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="cannot describe another hidden width"):
        reduced(loaded("bert", tmp_path), tmp_path / "out", **GOAL)


def test_a_narrower_model_learns_again(tmp_path: Path) -> None:
    """Its hidden states have another width than the teacher's: they are compared through a map."""
    reference = loaded("llama", tmp_path)
    folder = reduced(reference, tmp_path / "narrow", **GOAL)
    rows = DataSpec(source="json", files=(str(reference.with_suffix(".jsonl")),))
    how = Recover(held_out=8, sequence_length=32, batch_size=8, steps=20)
    out = tmp_path / "recovered"
    out.mkdir()
    recover.run(Recovery(recover=how, data=rows, task="text-generation"), reference, folder, out)
    learned = json.loads((out / "recovered.json").read_text())
    assert learned["end"]["output"] < learned["start"]["output"]
    assert not any(name.startswith("map/") for name in learned["trained"])


@pytest.mark.slow
def test_every_later_stage_takes_a_narrower_decoder(tmp_path: Path) -> None:
    model = write_tiny_decoder(tmp_path / "model", "llama", layers=3)
    int8 = {"bits": 8, "granularity": "group", "group_size": 16}
    made = decoder_recipe(str(model), tmp_path, {"weights": int8})
    asked = made.model_dump(exclude_unset=True, by_alias=True)
    recipe = Recipe.model_validate(
        {**asked, "reduce": {"goal": {"keep": 0.8}, "methods": ("hidden",)}}
    )
    outcome = pipeline.run(recipe, Store(tmp_path / "store"))
    (built,) = outcome.built
    report = json.loads((built.report.path / "report.json").read_text())
    assert {entry["hop"]: entry["ok"] for entry in report["ledger"]}["reduce"]
    assert all(entry["ok"] is not False for entry in report["ledger"])
    assert report["reduced"]["sizes"]["hidden"] == [64, 48]
