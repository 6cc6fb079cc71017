"""Clean pruned states pass, and every planted fault is named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from optimizer.compress.methods.pruning.magnitude import magnitude
from optimizer.compress.methods.pruning.wanda import wanda
from optimizer.compress.methods.weights.gptq import gptq_on_support
from optimizer.compress.stage import STAGE as COMPRESS
from optimizer.foundation import state as states
from optimizer.foundation.qtensor import QTensor, Scheme
from optimizer.foundation.sparsity import Pattern
from optimizer.foundation.state import CompressedState
from optimizer.load.stage import STAGE as LOAD
from optimizer.recipe.schema import CompressedTensorsTarget, Sparsity
from optimizer.validate.ledger import hops
from optimizer.validate.ledger.laws import sparsity_laws
from optimizer.validate.materials import Materials
from tests.compress.correlated import layer
from tests.conftest import sentences
from tests.decoders import write_tiny_decoder
from tests.validate.sparse_runs import SCHEMES, sparse_recipe

NAME = "model.layers.0.self_attn.q_proj.weight"
Clean = Callable[[str], Materials]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Clean:
    """The output of a scheme of sparse_runs, for a target without a graph, up to the hops of the
    state."""
    root = tmp_path_factory.mktemp("sparse")
    model = write_tiny_decoder(root / "llama", "llama")
    target = CompressedTensorsTarget(runtime="compressed-tensors")

    @cache
    def made(name: str) -> Materials:
        folder = root / name
        for part in ("data", "source", "state"):
            (folder / part).mkdir(parents=True)
        recipe = sparse_recipe(str(model), folder / "data", name)
        LOAD.run(recipe.model, out=folder / "source")
        COMPRESS.run(recipe.compression, folder / "source", out=folder / "state")
        paths = (folder / part for part in ("source", "state", "graph", "model", "engine"))
        return Materials(recipe.validation(target), *paths, texts=sentences(8, seed=9))

    return made


def damaged(clean: Materials, edit: Callable[[CompressedState], CompressedState]) -> list[str]:
    """The hop's problems of a state that was changed in memory, where its reader does not refuse
    it."""
    wrong = copy.copy(clean)
    for name in ("simulated_model", "simulated_traces", "folded_model", "folded_traces"):
        wrong.__dict__.pop(name, None)
    wrong.__dict__["state"] = edit(clean.state)
    return [p for p in hops.compress(wrong).problems if "quantization moves" not in p]


def with_values(state: CompressedState, values: Tensor) -> CompressedState:
    return replace(state, replaced={**state.replaced, NAME: values})


def with_integers(state: CompressedState, integers: Tensor) -> CompressedState:
    q = replace(state.weights[NAME], integers=integers.to(torch.int8))
    return replace(state, weights={**state.weights, NAME: q})


@pytest.mark.parametrize("name", SCHEMES)
def test_what_a_walk_pruned_obeys_every_law(clean: Clean, name: str) -> None:
    made = clean(name)
    assert len(made.state.sparsity) == 14
    for hop in (hops.fold, hops.compress):
        entry = hop(made)
        assert [p for p in entry.problems if "quantization moves" not in p] == []
        assert entry.unproven == "" or ("tuned" in name and "learned" in entry.unproven)


def let_back(values: Tensor, dense: Tensor) -> Tensor:
    row, column = (values == 0).nonzero()[7].tolist()
    values[row, column] = dense[row, column]
    return values


def three_of_four(values: Tensor, dense: Tensor) -> Tensor:
    mask = magnitude(dense[:1], Pattern.parse("3:4"))[0]
    values[0] = dense[0] * mask
    return values


def shifted(values: Tensor, dense: Tensor) -> Tensor:
    return dense * (values != 0).roll(1, 1)


def shifted_by_groups(values: Tensor, dense: Tensor) -> Tensor:
    return dense * (values != 0).roll(4, 1)


def other_rows(values: Tensor, dense: Tensor) -> Tensor:
    return dense * (values != 0).roll(1, 0)


def transposed(values: Tensor, dense: Tensor) -> Tensor:
    return dense * (values != 0).T


FAULTS = [let_back, three_of_four, shifted, shifted_by_groups, other_rows, transposed]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", ["magnitude", "wanda", "sparsegpt"])
def test_a_wrong_mask_of_float_weights_is_named(
    clean: Clean, name: str, fault: Callable[[Tensor, Tensor], Tensor]
) -> None:
    made = clean(name)
    values = fault(made.state.replaced[NAME].clone(), made.parameters[NAME])
    problems = damaged(made, lambda state: with_values(state, values))
    assert any(NAME.removesuffix(".weight") in p for p in problems)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("magnitude + rtn", "let back"),
        ("magnitude + rtn", "shifted"),
        ("magnitude + rtn", "other rows"),
        ("sparsegpt + gptq", "let back"),
        ("sparsegpt + gptq", "shifted"),
        ("sparsegpt + gptq", "other rows"),
        ("sparsegpt + gptq, tuned", "let back"),
        ("sparsegpt + gptq, tuned", "shifted"),
    ],
)
def test_a_wrong_mask_of_integers_is_named(clean: Clean, name: str, fault: str) -> None:
    made = clean(name)
    codes = made.state.weights[NAME].integers.clone()
    if fault == "let back":
        pattern = made.state.pattern_of(NAME)
        assert pattern is not None
        full = pattern.grouped(codes != 0).sum(-1) == pattern.group(64) - pattern.zeros(64)
        row = int(full.any(1).int().argmax())
        group = int(full[row].int().argmax()) * pattern.group(64)
        column = group + int((codes[row, group : group + pattern.group(64)] == 0).int().argmax())
        codes[row, column] = 1
    else:
        codes = codes.roll(1, 1) if fault == "shifted" else codes.roll(1, 0)
    problems = damaged(made, lambda state: with_integers(state, codes))
    assert any(NAME in p for p in problems)


def test_a_weight_that_is_kept_and_changed_is_named(clean: Clean) -> None:
    made = clean("wanda")
    values = made.state.replaced[NAME].clone()
    row, column = values.nonzero()[3].tolist()
    values[row, column] *= 1.001
    problems = damaged(made, lambda state: with_values(state, values))
    assert problems == [
        f"{NAME}: row {row} input {column} is kept, but differs from the checkpoint"
    ]


@pytest.mark.parametrize("method", ["magnitude", "wanda"])
def test_error_feedback_may_make_a_kept_weight_zero_and_no_pruned_one_another(method: str) -> None:
    weight, hessian = layer(seed=2)
    pattern = Pattern.parse("1:4")
    norms = hessian.diagonal().sqrt()
    mask = magnitude(weight, pattern) if method == "magnitude" else wanda(weight, norms, pattern)
    q = gptq_on_support(weight, hessian, Scheme(4, True, "group", 32), mask).q
    section = Sparsity(method=method, pattern="1:4")
    assert sparsity_laws._one(q, weight, section, nearest=False) == ""
    assert "keeps it" in (wrong := sparsity_laws._one(q, weight, section, nearest=True)) or (
        method == "wanda" and "lost" in wrong
    )
    codes = q.integers.clone()
    codes[3, :4] = torch.where(mask[3, :4], 0, torch.tensor([1, 1, 1, 1])).to(torch.int8)
    codes[3, :4] *= torch.arange(4) == int((codes[3, :4] != 0).int().argmax())
    other = sparsity_laws._one(replace(q, integers=codes), weight, section, nearest=False)
    assert ("prunes it" in other) == (method == "magnitude")


def test_one_more_lost_than_the_pattern_prunes_is_named(clean: Clean) -> None:
    for name in ("magnitude", "wanda"):
        made = clean(name)
        values = made.state.replaced[NAME].clone()
        row, column = values.nonzero()[3].tolist()
        values[row, column] = 0.0
        problems = damaged(made, lambda state: with_values(state, values))  # noqa: B023
        assert any(NAME in p and ("keeps it" in p or "lost" in p) for p in problems)


def test_what_is_pruned_is_what_the_recipe_says(clean: Clean) -> None:
    made = clean("sparsegpt + gptq")
    other = "model.layers.1.self_attn.q_proj.weight"

    def forgotten(state: CompressedState) -> CompressedState:
        return replace(state, sparsity={n: p for n, p in state.sparsity.items() if n != other})

    assert f"{other}: is dense, but the recipe prunes it" in damaged(made, forgotten)
    wrong = copy.copy(made)
    section = made.section.sparsity
    assert section is not None
    kept = section.model_copy(update={"keep_dense": ("*.q_proj",)})
    wrong.section = made.section.model_copy(update={"sparsity": kept})
    assert len([p for p in hops.compress(wrong).problems if "does not say so" in p]) == 2


def test_a_mask_chosen_before_folding_is_named(clean: Clean, tmp_path: Path) -> None:
    """Magnitudes are those of the folded weight: smoothing multiplies inputs unequally."""
    made = clean("magnitude + rtn")
    dense = made.parameters[NAME]
    scales = torch.linspace(0.5, 4.0, dense.shape[1])
    pattern = made.state.pattern_of(NAME)
    assert pattern is not None
    early = dense * scales * magnitude(dense, pattern)

    def folded_afterwards(state: CompressedState) -> CompressedState:
        q = state.weights[NAME]
        scale = states.to_scale_grid(early.reshape(len(early), -1, 32).abs().amax(-1) / 7)
        codes = early.reshape(len(early), -1, 32) / scale[..., None]
        wrong = QTensor(codes.round().reshape(early.shape).to(torch.int8), scale, None, q.scheme)
        return replace(
            state,
            weights={**state.weights, NAME: wrong},
            replaced={**state.replaced, NAME: dense * scales},
        )

    problems = damaged(made, folded_afterwards)
    assert any(NAME in p and ("keeps it" in p or "prunes it" in p) for p in problems)
