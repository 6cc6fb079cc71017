"""Compressing causal language models: every method on every kind, and what must hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from optimizer.compress import stage
from optimizer.foundation.errors import DataError, RecipeError
from tests.compress.decoders import GROUPS, compress, error, loaded, section
from tests.decoders import write_tiny_decoder


@pytest.fixture(scope="module")
def rounding(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    """The error of round to nearest, which calibrated methods must be below."""
    out = tmp_path_factory.mktemp("rtn") / "out"
    return error(llama, compress(llama, out, methods=["rtn"]))


@pytest.mark.parametrize("kind", ["mistral", "qwen2", "qwen3", "gpt2", "opt"])
def test_on_every_kind_gptq_after_awq_is_better_than_rounding(kind: str, tmp_path: Path) -> None:
    source = loaded(write_tiny_decoder(tmp_path / kind, kind), tmp_path / "load")
    state = compress(source, tmp_path / "out", methods=["awq", "gptq"])
    assert len(state.weights) == 2 * {"gpt2": 4, "opt": 6}.get(kind, 7)
    rounded = compress(source, tmp_path / "rtn", methods=["rtn"])
    assert 0 < error(source, state) < error(source, rounded)


@pytest.mark.parametrize(
    "methods", [["gptq"], ["awq"], ["rotation"], ["awq", "gptq"], ["rotation", "gptq"]]
)
def test_every_method_is_better_than_rounding(
    llama: Path, rounding: float, tmp_path: Path, methods: list[str]
) -> None:
    state = compress(llama, tmp_path / "out", methods=methods)
    assert 0 < error(llama, state) < rounding


def test_fewer_windows_than_asked_for_are_refused(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    asked = section(llama, methods=["gptq"])
    assert asked.calibrate is not None
    more = asked.calibrate.model_copy(update={"samples": 4000})
    wanting = asked.model_copy(update={"calibrate": more})
    with pytest.raises(DataError, match=r"fills \d+ of 4000 windows"):
        stage.run(wanting, llama, tmp_path / "out")


def test_a_rule_gives_some_modules_other_weights(llama: Path, tmp_path: Path) -> None:
    rule = {"modules": ["*.down_proj"], "weights": {"bits": 8, "granularity": "channel"}}
    state = compress(llama, tmp_path / "out", method="rtn", layers=[rule])
    bits = {n: q.scheme.bits for n, q in state.weights.items()}
    assert {b for n, b in bits.items() if "down_proj" in n} == {8}
    assert {b for n, b in bits.items() if "down_proj" not in n} == {4}


def test_a_rule_that_matches_nothing_is_an_error(llama: Path, tmp_path: Path) -> None:
    rule = {"modules": ["*.dwon_proj"], "weights": GROUPS}
    with pytest.raises(RecipeError, match="matches no module") as e:
        compress(llama, tmp_path / "out", method="rtn", layers=[rule])
    assert e.value.where == "quantize.layers.0.modules.0"


HEAD = {"bits": 8, "granularity": "group", "group_size": 32}


def test_a_tied_head_has_the_embeddings_integers_also_under_gptq(
    llama: Path, tmp_path: Path
) -> None:
    heads: dict[str, Any] = {"tied": "tied", "own": HEAD}
    states = {
        name: compress(llama, tmp_path / name, methods=["gptq"], embedding=HEAD, head=head)
        for name, head in heads.items()
    }
    same = {
        name: torch.equal(
            state.weights["lm_head.weight"].integers,
            state.weights["model.embed_tokens.weight"].integers,
        )
        for name, state in states.items()
    }
    assert same == {"tied": True, "own": False}


def test_a_head_that_is_not_tied_cannot_have_the_embeddings_integers(tmp_path: Path) -> None:
    source = loaded(write_tiny_decoder(tmp_path / "m", tied=False), tmp_path / "load")
    with pytest.raises(RecipeError, match=r"quantize\.head: tied.*does not tie it"):
        compress(source, tmp_path / "out", method="rtn", embedding=HEAD, head="tied")
    with pytest.raises(ValidationError, match="set embedding as well"):
        compress(source, tmp_path / "out2", method="rtn", head="tied")
