"""Modules are selected, and recipes refused, before any weight is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from optimizer.compress.selection import Selection, select
from optimizer.compress.walk.model_source import ModelSource
from optimizer.foundation.errors import RecipeError
from optimizer.model.architectures.architecture import find_family
from optimizer.model.architectures.families import FAMILIES
from optimizer.model.architectures.family_record import Family
from optimizer.model.checkpoint.checkpoint import open_checkpoint
from optimizer.model.checkpoint.model import build_skeleton
from optimizer.recipe.schema import Activations, Quantize, Weights


@pytest.fixture(scope="module")
def choose(loaded: Path):  # type: ignore[no-untyped-def]
    checkpoint = open_checkpoint(loaded)
    model = build_skeleton(checkpoint, "sentence-embedding")
    own = find_family(checkpoint.config, "sentence-embedding")

    def call(family: Family = own, **quantize: object) -> Selection:
        source = ModelSource(model, checkpoint.tensors, family, "")
        return select(source, Quantize(**quantize))  # type: ignore[arg-type]

    return call


def test_a_pattern_keeps_a_module_and_all_below_it_in_float(choose) -> None:  # type: ignore[no-untyped-def]
    for pattern in ("encoder.layer.0", "encoder.layer.0.*"):
        chosen = choose(keep_float=(pattern,))
        assert len(chosen.quantized) == 6
        assert all(m.startswith("encoder.layer.1.") for m in chosen.quantized)
        assert f"keep_float: {pattern}" in {n.why for n in chosen.notes}


def test_every_module_left_in_float_has_a_note(choose) -> None:  # type: ignore[no-untyped-def]
    chosen = choose(keep_float=("*.query",))
    noted = {n.module for n in chosen.notes}
    assert {"encoder.layer.0.attention.self.query", "embeddings.word_embeddings"} <= noted
    assert not noted & chosen.quantized.keys()


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("encoder.layers.0.output.dense", "encoder.layer.0.output.dense"),
        ("bert.encoder.layer.1", "encoder.layer.1"),
        ("layer.0.attention", "encoder.layer.0.attention"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error(choose, pattern: str, near: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RecipeError, match="matches no module") as e:
        choose(keep_float=("embeddings.*", pattern))
    assert f'"{near}' in str(e.value)
    assert e.value.where == "quantize.keep_float.1"


def test_a_group_that_does_not_divide_is_refused_with_the_sizes_that_do(choose) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RecipeError, match=r"encoder\.layer\.0\.attention\.self\.query") as e:
        choose(weights=Weights(bits=4, granularity="group", group_size=128))
    assert e.value.accepted == "16, 32, 64"


def test_integers_in_attention_are_refused_where_its_products_are_others(choose) -> None:  # type: ignore[no-untyped-def]
    activations = Activations(attention="int8")
    assert choose(activations=activations).quantized
    with pytest.raises(RecipeError, match="not two plain products") as e:
        choose(family=replace(FAMILIES["deberta-v2"], base="bert"), activations=activations)
    assert e.value.where == "quantize.activations.attention"


def test_keeping_everything_in_float_is_an_error(choose) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(RecipeError, match="nothing to compress"):
        choose(keep_float=("*",))
