"""Bits by sensitivity, from the recipe to the state."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optimizer.checks import accepted
from optimizer.checks.context import Context
from optimizer.compress.methods.precision.mixed_precision import compute_stored_sizes
from optimizer.foundation import state
from optimizer.foundation.errors import RecipeError
from optimizer.foundation.qtensor import Scheme
from optimizer.recipe import file as recipe_file
from optimizer.recipe.compression import composition
from optimizer.recipe.schema import Quantize
from tests.compress.checkpoints import contents, modules
from tests.compress.decoders import GROUPS, compress, error, loaded
from tests.decoders import write_tiny_decoder

RULE = {"modules": ["*.0.mlp.down_proj"], "weights": {"bits": 8, "granularity": "channel"}}


@pytest.fixture(scope="module")
def chosen(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state whose bits were chosen, with one module that a rule decides."""
    out = tmp_path_factory.mktemp("chosen") / "out"
    compress(llama, out, methods=["rtn"], allocate={}, layers=[RULE])
    return out


def sizes(made: state.CompressedState, schemes: dict[str, Scheme] | None = None) -> list[int]:
    """Bytes of all weights in both forms; of other schemes than their own when given."""
    each = [
        compute_stored_sizes((schemes or {}).get(name, q.scheme), *q.integers.shape)
        for name, q in made.weights.items()
    ]
    return [sum(file) for file in zip(*each, strict=True)]


def test_the_files_are_no_larger_than_with_uniform_weights(chosen: Path) -> None:
    made = state.read(chosen)
    uniform = {n: Scheme(**GROUPS) for n in made.weights if "0.mlp.down_proj" not in n}  # type: ignore[arg-type]
    assert len({q.scheme for q in made.weights.values()}) > 2
    assert all(a <= b for a, b in zip(sizes(made), sizes(made, uniform), strict=True))


def test_a_rule_comes_before_the_choice(chosen: Path) -> None:
    row = modules(chosen)["model.layers.0.mlp.down_proj"]
    assert row["scheme"] == "W8 channel"
    assert "sensitivity" not in row["note"]


def test_the_report_says_what_the_choice_was_based_on(chosen: Path) -> None:
    for name, row in modules(chosen).items():
        if row["scheme"] != "float" and name != "model.layers.0.mlp.down_proj":
            assert "by sensitivity: " in row["note"]
            assert ("as quantize.weights says" in row["note"]) == (row["scheme"] != "W4 group 32")


def test_the_same_recipe_makes_the_same_choice(chosen: Path, llama: Path, tmp_path: Path) -> None:
    compress(llama, tmp_path / "out", methods=["rtn"], allocate={}, layers=[RULE])
    assert contents(tmp_path / "out") == contents(chosen)


def test_more_bits_bring_the_answers_closer(llama: Path, tmp_path: Path) -> None:
    errors = []
    for bits in (4.3, 5.0, 7.0):
        out = tmp_path / str(bits)
        made = compress(llama, out, methods=["gptq"], allocate={"average_bits": bits})
        weights = sum(q.integers.numel() for q in made.weights.values())
        assert sizes(made)[1] <= bits * weights / 8
        errors.append(error(llama, made))
    assert errors == sorted(errors, reverse=True)


def test_too_few_bits_are_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="smallest choices") as e:
        compress(llama, tmp_path / "out", methods=["gptq"], allocate={"average_bits": 3.9})
    assert e.value.where == "quantize.allocate.average_bits"


def test_a_choice_made_before_a_kill_is_not_made_again(llama: Path, tmp_path: Path) -> None:
    kept = {
        f"model.layers.{i}.mlp.up_proj": {
            "scheme": {"bits": 8, "symmetric": True, "granularity": "channel", "group_size": None},
            "why": "kept",
        }
        for i in (0, 1)
    }
    progress = tmp_path / "out" / "progress"
    progress.mkdir(parents=True)
    (progress / "allocation.json").write_text(json.dumps(kept))
    made = going_on(llama, tmp_path / "out", methods=["rtn"], allocate={})
    bits = {n: q.scheme.bits for n, q in made.weights.items()}
    assert {n.removesuffix(".weight") for n, b in bits.items() if b == 8} == kept.keys()


def going_on(source: Path, out: Path, **quantize: Any) -> state.CompressedState:
    """As `compress`, in a folder that a run has left."""
    from optimizer.compress import stage
    from tests.compress.decoders import section

    stage.run(section(source, **quantize), source, out=out)
    return state.read(out)


def test_modules_of_one_input_can_share_their_choice(llama: Path, tmp_path: Path) -> None:
    asked = {"share_choice": True, "average_bits": 5.3}
    made = compress(llama, tmp_path / "out", methods=["rtn"], allocate=asked)
    for i in (0, 1):
        qkv = {made.weights[f"model.layers.{i}.self_attn.{n}_proj.weight"].scheme for n in "qkv"}
        assert len(qkv) == 1
    assert len({q.scheme for q in made.weights.values()}) > 1


@pytest.mark.parametrize("kind", ["gpt2", "opt", "qwen3"])
def test_other_kinds_of_decoders_have_sensitivities_too(kind: str, tmp_path: Path) -> None:
    source = loaded(write_tiny_decoder(tmp_path / kind, kind), tmp_path / "load")
    made = compress(source, tmp_path / "out", methods=["gptq"], allocate={"average_bits": 5.0})
    assert len({q.scheme for q in made.weights.values()}) > 1


def test_bits_can_be_chosen_for_a_rotated_model(llama: Path, tmp_path: Path) -> None:
    made = compress(
        llama, tmp_path / "out", methods=["rotation", "gptq"], allocate={"average_bits": 5.0}
    )
    assert len({q.scheme for q in made.weights.values()}) > 1


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"allocate": {"choices": [{**GROUPS, "bits": 3}]}}, "3 bits are stored as 4"),
        (
            {
                "allocate": {},
                "activations": {"granularity": "token"},
                "weights": {"bits": 8, "granularity": "channel"},
            },
            "errors of weights only",
        ),
        ({"methods": ["gptq"], "allocate": {}}, "with gptq uniform weights are better"),
    ],
)
def test_what_would_gain_nothing_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        composition.check(Quantize.model_validate_json(json.dumps(asked)))


RECIPES = Path(__file__).parents[4] / "recipes"


def test_every_target_takes_the_usual_choices() -> None:
    overrides = ["quantize.methods=[rtn]", "quantize.allocate={}"]
    accepted.check(recipe_file.read(RECIPES / "smollm2-int4.yaml", overrides), Context())
    rtx = "targets=[{runtime: tensorrt-rtx, device: cuda, float: fp16, shapes: "
    rtx += "{batch: [1, 1, 1], sequence: [1, 64, 512], past: [0, 128, 512]}}]"
    overrides += [rtx, "quantize.embedding=float"]
    accepted.check(recipe_file.read(RECIPES / "smollm2-int4.yaml", overrides), Context())


def test_a_choice_that_a_target_does_not_keep_packed_is_refused() -> None:
    overrides = [
        "quantize.methods=[rtn]",
        "quantize.allocate.choices=[{bits: 4, granularity: group, group_size: 48}]",
    ]
    with pytest.raises(RecipeError, match=r"allocate\.choices\.0\.group_size: 48 is not accepted"):
        accepted.check(recipe_file.read(RECIPES / "smollm2-int4.yaml", overrides), Context())


def test_only_language_models_have_their_bits_chosen() -> None:
    with pytest.raises(RecipeError, match="allocate belongs to task text-generation"):
        recipe_file.read(RECIPES / "minilm-int8.yaml", ["quantize={allocate: {}}"])
