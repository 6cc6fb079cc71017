"""Choices by data: every importance on every architecture, blocks, and resuming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from optimizer.harness import contract as contracts
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import load_torch_model
from optimizer.reduce.structure import depth, width
from optimizer.reduce.structure.sizes import SizeChoices, Sizes, solve
from tests.conftest import sentences
from tests.reduce.smaller import copied, loaded, reduced, section
from tests.validate.ledger.laws.reduce.test_structure_laws import hop

IMPORTANCES = ("magnitude", "activations", "fisher", "second_order")


@pytest.fixture(scope="module", params=["bert", "albert", "llama", "gpt2"])
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loaded(request.param, tmp_path_factory.mktemp(request.param))


def output(folder: Path) -> torch.Tensor:
    """On held-out text."""
    contract = contracts.read(folder / "contract.json")
    tokenizer = load_tokenizer(folder / "checkpoint", contract)
    ids = [i for text in sentences(60, seed=77) for i in tokenizer.encode(text).ids]
    model: Any = load_torch_model(open_checkpoint(folder), contract.task)
    with torch.no_grad():
        return model(input_ids=torch.tensor(ids[: 24 * 24]).reshape(24, 24))[0]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def document(folder: Path) -> Any:
    return json.loads((folder / "reduced.json").read_text())


def test_second_order_errs_least_and_fisher_less_than_magnitude(
    reference: Path, tmp_path: Path
) -> None:
    """And what each wrote passes the hop of the ledger, which knows what it may adjust."""
    expected = output(reference)
    error = {}
    for importance in IMPORTANCES:
        folder = reduced(reference, tmp_path / importance, {"keep": 0.7}, importance=importance)
        error[importance] = float((output(folder) - expected).norm() / expected.norm())
        assert hop(reference, folder).problems == ()
        assert not (folder / "progress").exists()
    assert error["second_order"] < min(error["fisher"], error["activations"])
    assert error["fisher"] < error["magnitude"]


@pytest.mark.parametrize("importance", ["fisher", "second_order"])
def test_keeping_all_adjusts_nothing(importance: str, reference: Path, tmp_path: Path) -> None:
    folder = reduced(reference, tmp_path / "out", {"keep": 1.0}, importance=importance)
    weights = "checkpoint/model.safetensors"
    assert (folder / weights).read_bytes() == (reference / weights).read_bytes()


def test_killed_in_a_block_it_resumes_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = loaded("bert", tmp_path)
    options = {"goal": {"keep": 0.6}, "methods": ["width", "depth"], "importance": "second_order"}
    whole = contents(reduced(reference, tmp_path / "whole", **options))
    kept, calls = width._keep, []

    def killed(folder: Path, *rest: Any) -> None:
        if calls:
            raise KeyboardInterrupt
        calls.append(folder)
        kept(folder, *rest)

    monkeypatch.setattr(width, "_keep", killed)
    with pytest.raises(KeyboardInterrupt):
        reduced(reference, tmp_path / "again", **options)
    monkeypatch.setattr(width, "_keep", kept)
    monkeypatch.setattr(depth._DepthSearch, "_round", lambda *_: pytest.fail("blocks chosen again"))
    assert contents(reduced(reference, tmp_path / "again", **options)) == whole


def without_effect(reference: Path, block: str, folder: Path) -> Path:
    """The reference, with a block that adds nothing to the residual."""
    copied(reference, folder)
    file = folder / "checkpoint" / "model.safetensors"
    tensors = load_file(file)
    for name in (n for n in tensors if n.startswith(f"{block}.")):
        if name.endswith(("o_proj.weight", "down_proj.weight", "c_proj.weight", "c_proj.bias")):
            tensors[name] = torch.zeros_like(tensors[name])
    save_file(tensors, file)
    return folder


@pytest.mark.parametrize("how", ["measured", "influence"])
@pytest.mark.parametrize(
    ("kind", "block"), [("llama", "model.layers.1"), ("gpt2", "transformer.h.1")]
)
def test_a_block_that_adds_nothing_goes_first_and_changes_nothing(
    how: str, kind: str, block: str, tmp_path: Path
) -> None:
    reference = without_effect(loaded(kind, tmp_path, layers=4), block, tmp_path / "idle")
    folder = reduced(reference, tmp_path / "out", {"depth": 3}, depth_importance=how)
    (gone,) = document(folder)["left_out"]
    assert gone["block"] == block
    assert abs(gone["value"]) < 1e-6
    torch.testing.assert_close(output(folder), output(reference))
    assert hop(reference, folder).problems == ()


def test_measured_choices_diverge_less_than_influence_says(tmp_path: Path) -> None:
    """Of random models, in sum: influence does not know what the blocks after one make of it."""
    diverged: dict[str, float] = dict.fromkeys(("measured", "influence"), 0.0)
    reference = loaded("llama", tmp_path, layers=6)
    expected = output(reference).log_softmax(-1)
    for how in diverged:
        folder = reduced(reference, tmp_path / how, {"depth": 4}, depth_importance=how)
        other = output(folder).log_softmax(-1)
        diverged[how] = float((expected.exp() * (expected - other)).sum(-1).mean())
    assert diverged["measured"] <= diverged["influence"]


def test_blocks_and_width_are_cut_evenly_for_one_goal(tmp_path: Path) -> None:
    reference = loaded("llama", tmp_path, layers=6)
    folder = reduced(
        reference, tmp_path / "out", {"keep": 0.6}, methods=["width", "depth"], importance="fisher"
    )
    sizes, weights = document(folder)["sizes"], document(folder)["weights"]["blocks"]
    assert 0.55 < weights[1] / weights[0] <= 0.6
    assert sizes["blocks"] == [6, 4]
    assert 0.5 * sizes["ffn"][0] < sizes["ffn"][1] < sizes["ffn"][0]
    assert hop(reference, folder).problems == ()


def test_the_solver_finds_the_least_cut_of_all_candidates() -> None:
    """Against trying every one."""
    import math
    from itertools import product

    from optimizer.recipe.reduce import Goal

    full = Sizes(8, 64, 4)
    model = SizeChoices(full, 96, 3000, 500, 9999, range(1, 9), range(8, 65, 8), (1, 2, 4))
    for keep in (0.3, 0.55, 0.8, 1.0):
        best = solve(Goal(keep=keep), model)
        within = [
            Sizes(*s)
            for s in product(model.blocks, model.ffn, model.heads)
            if model.in_blocks(Sizes(*s)) <= keep * model.in_blocks(full)
        ]

        def cut(s: Sizes) -> float:
            shares = (s.blocks / 8, s.ffn / 64, s.heads / 4)
            return sum(math.log(share) ** 2 for share in shares)

        assert cut(best) == min(map(cut, within))


def test_texts_for_blocks_are_spread_over_batches_of_one_length_each(tmp_path: Path) -> None:
    """Encoders' batches are in order of length: the first ones are all short."""
    from optimizer.compress.data import calibration

    reference = loaded("bert", tmp_path)
    batches = calibration.make_batches(section(reference, {"depth": 2}), reference)
    some = depth.sample_texts(batches, 6)
    lengths = [int(batch["attention_mask"].sum()) for batch in some]
    assert len(some) == 6
    assert lengths[0] < lengths[2] < lengths[5]
