"""Pruning in the walk, and the correction of errors of earlier blocks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from optimizer.compress import stage
from optimizer.compress.estimate import estimate
from optimizer.foundation import state as states
from optimizer.foundation.errors import RecipeError
from optimizer.foundation.sparsity import Pattern, describe_violation
from optimizer.foundation.state import CompressedState
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.recipe.schema import Compression, Quantize, Sparsity
from tests.compress import checkpoints, decoders
from tests.compress.decoders import GROUPS, error

FLOAT = {"method": "float_weights"}
GPTQ = {"methods": ["gptq"], "weights": GROUPS}


def section(source: Path, sparsity: dict[str, Any], quantize: dict[str, Any]) -> Compression:
    update = {
        "sparsity": Sparsity.model_validate_json(json.dumps(sparsity)),
        "quantize": Quantize.model_validate_json(json.dumps(quantize)),
    }
    return decoders.section(source).model_copy(update=update)


def compress(
    source: Path, out: Path, sparsity: dict[str, Any], quantize: dict[str, Any]
) -> CompressedState:
    out.mkdir()
    stage.run(section(source, sparsity, quantize), source, out=out)
    return states.read(out)


def test_more_of_the_inputs_loses_less_of_the_answer(llama: Path, tmp_path: Path) -> None:
    errors = [
        error(llama, compress(llama, tmp_path / method, {"method": method}, FLOAT))
        for method in ("sparsegpt", "wanda", "magnitude")
    ]
    assert errors == sorted(errors)


def test_aiming_at_the_float_model_makes_up_for_earlier_blocks(llama: Path, tmp_path: Path) -> None:
    errors = [
        error(
            llama,
            compress(
                llama,
                tmp_path / str(aims),
                {"method": "sparsegpt", "sparsegpt": {"float_target": aims}},
                FLOAT,
            ),
        )
        for aims in (True, False)
    ]
    assert errors[0] < 0.98 * errors[1]


@pytest.mark.parametrize("pattern", ["2:4", "unstructured"])
def test_a_float_weight_that_is_pruned_is_a_replaced_one(
    llama: Path, tmp_path: Path, pattern: str
) -> None:
    made = compress(llama, tmp_path / "out", {"method": "wanda", "pattern": pattern}, FLOAT)
    assert not made.weights
    assert sorted(made.sparsity) == sorted(made.replaced)
    assert len(made.sparsity) == 14
    source = open_checkpoint(llama).tensors
    for name, text in made.sparsity.items():
        value = made.replaced[name]
        assert describe_violation(value != 0, Pattern.parse(text)) == ""
        assert torch.equal(value[value != 0], source[name].float()[value != 0])
    rows = checkpoints.modules(tmp_path / "out")
    words = {row["scheme"] for row in rows.values() if "sparse" in row["scheme"]}
    assert words == {f"float, {next(iter(made.sparsity.values()))} sparse"}


@pytest.mark.parametrize(
    "quantize",
    [
        {"methods": ["rtn"], "weights": GROUPS},
        {"methods": ["awq"], "weights": {**GROUPS, "symmetric": False}},
        {"methods": ["awq", "gptq"], "weights": GROUPS},
        {"methods": ["rotation", "gptq"], "weights": {"bits": 8}},
        {"methods": ["smoothquant", "gptq"], "weights": {"bits": 8}, "activations": {}},
    ],
    ids=str,
)
def test_a_pruned_integer_is_the_zero_point_whatever_rounds(
    llama: Path, tmp_path: Path, quantize: dict[str, Any]
) -> None:
    made = compress(llama, tmp_path / "out", {"method": "wanda"}, quantize)
    assert sorted(made.sparsity) == sorted(made.weights)
    for name in made.sparsity:
        assert describe_violation(made.weights[name].nonzero(), Pattern.parse("2:4")) == ""


def test_a_second_walk_keeps_the_zeros_of_a_first(llama: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    first = compress(llama, tmp_path / "first", {"method": "sparsegpt"}, FLOAT)
    base = decoders.loaded(llama / "checkpoint", tmp_path / "base")
    file = next((base / "checkpoint").glob("*.safetensors"))
    pruned = {n: first.replaced.get(n, t) for n, t in load_file(file).items()}
    save_file(pruned, file, {"format": "pt"})
    two = compress(base, tmp_path / "two", {"method": "magnitude"}, GPTQ)
    for name in two.sparsity:  # magnitude keeps the zeros that there are
        assert not bool(two.weights[name].nonzero()[pruned[name] == 0].any())


def test_what_is_kept_dense_is_dense(llama: Path, tmp_path: Path) -> None:
    sparsity = {"method": "magnitude", "modules": ["*.mlp"], "keep_dense": ["*.layers.0.*"]}
    made = compress(llama, tmp_path / "out", sparsity, FLOAT)
    assert sorted(n.removesuffix("_proj.weight") for n in made.sparsity) == [
        f"model.layers.1.mlp.{part}" for part in ("down", "gate", "up")
    ]
    notes = {n.module: n.why for n in made.notes}
    assert notes["model.layers.0.mlp.up_proj"] == "sparsity: kept dense"
    assert "lm_head" in notes


@pytest.mark.parametrize(
    ("sparsity", "message"),
    [
        ({"method": "magnitude", "keep_dense": ["*.mpl.*"]}, "'\\*.mpl.\\*' matches no module"),
        ({"method": "magnitude", "modules": ["lm_head"]}, "nothing to prune"),
        ({"method": "magnitude", "pattern": "3:5"}, "5 does not divide the 64 inputs of"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_before_any_work(
    llama: Path, sparsity: dict[str, Any], message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        stage.check(section(llama, sparsity, FLOAT), llama)


def test_without_calibration_magnitude_prunes_each_weight_by_itself(
    loaded: Path, tmp_path: Path
) -> None:
    plain = checkpoints.section(loaded, data=False)
    update = {
        "sparsity": Sparsity(method="magnitude"),
        "quantize": Quantize(method=FLOAT["method"]),
    }
    (tmp_path / "out").mkdir()
    stage.run(plain.model_copy(update=update), loaded, out=tmp_path / "out")
    made = states.read(tmp_path / "out")
    assert len(made.sparsity) == 12
    assert all(
        describe_violation(made.replaced[n] != 0, Pattern.parse("2:4")) == "" for n in made.sparsity
    )


def test_a_walk_that_was_stopped_ends_in_the_same_bytes(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compress(llama, tmp_path / "whole", {"method": "sparsegpt"}, FLOAT)
    done = stage.segments.compress
    calls: list[int] = []

    def stops(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return done(*args)

    monkeypatch.setattr(stage.segments, "compress", stops)
    with pytest.raises(KeyboardInterrupt):
        compress(llama, tmp_path / "out", {"method": "sparsegpt"}, FLOAT)
    monkeypatch.undo()
    stage.run(section(llama, {"method": "sparsegpt"}, FLOAT), llama, tmp_path / "out")
    whole, resumed = (checkpoints.contents(tmp_path / name) for name in ("whole", "out"))
    assert whole == resumed


def test_what_it_needs_is_predicted(llama: Path) -> None:
    shapes = {n: tuple(t.shape) for n, t in open_checkpoint(llama).tensors.items()}
    dense = estimate(decoders.section(llama, method="rtn"), shapes)
    pruned = estimate(section(llama, {"method": "sparsegpt"}, FLOAT), shapes)
    assert pruned.seconds > dense.seconds
    assert pruned.memory > dense.memory
    assert pruned.disk > dense.disk  # floats, not integers
