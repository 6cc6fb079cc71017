"""Check that sizes in config.json have a range and fit into the weights next to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from optimizer.foundation.errors import CheckpointError
from optimizer.load.config import config_fields


def config(bert: Path, **changed: Any) -> dict[str, Any]:
    return {**json.loads((bert / "config.json").read_text()), **changed}


@pytest.mark.parametrize("field", config_fields.SIZES)
@pytest.mark.parametrize("value", [-1, 10**12, "many", 2.5, ["a"]])
def test_a_size_that_is_none_is_named_with_its_range(field: str, value: object) -> None:
    with pytest.raises(
        CheckpointError, match=rf"config\.json: {field}: .*Accepted: a whole number"
    ):
        config_fields.check({field: value}, "config.json")


def test_a_default_and_a_size_per_layer_are_taken() -> None:
    fields = {"n_inner": None, "vocab_size": None, "intermediate_size": [64, 128], "head_dim": 0}
    config_fields.check(fields, "config.json")


def test_the_default_config_of_every_architecture_is_taken() -> None:
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    )

    kinds = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES}
    for kind in kinds:
        try:
            config = AutoConfig.for_model(kind)
        except Exception:  # of many kinds: it has no default of its own
            continue
        fields = json.loads(config.to_json_string(use_diff=False))
        config_fields.check(fields, kind)
        config_fields.check_activations(fields, kind)


@pytest.mark.parametrize(
    "field", ["hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers"]
)
def test_a_size_beyond_the_weights_is_refused_before_it_is_allocated(
    bert: Path, field: str
) -> None:
    config_fields.check_sizes(config(bert), bert, "config.json")
    with pytest.raises(CheckpointError, match=f"{field}.*different models"):
        config_fields.check_sizes(config(bert, **{field: 900_000}), bert, "config.json")


def test_positions_count_only_where_they_are_learned(bert: Path) -> None:
    far = config(bert, max_position_embeddings=10_000_000)
    with pytest.raises(CheckpointError, match="max_position_embeddings"):
        config_fields.check_sizes(far, bert, "config.json")
    config_fields.check_sizes({**far, "model_type": "llama"}, bert, "config.json")


def test_blocks_that_are_one_block_need_no_tensors_of_their_own(bert: Path) -> None:
    many = config(bert, num_hidden_layers=500)
    with pytest.raises(CheckpointError, match="500 blocks"):
        config_fields.check_sizes(many, bert, "config.json")
    config_fields.check_sizes({**many, "num_hidden_groups": 1}, bert, "config.json")


def test_weights_that_are_not_the_models_are_not_looked_at(bert: Path) -> None:
    (bert / "model.safetensors").rename(bert / "pytorch_model.bin")
    (bert / "adapter_model.safetensors").write_bytes(b"nothing of the sort")
    config_fields.check_sizes(config(bert), bert, "config.json")


@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), "x"])
def test_a_constant_that_makes_every_answer_nonsense_is_named(value: object) -> None:
    for field in ("layer_norm_eps", "rms_norm_eps", "rope_theta"):
        with pytest.raises(CheckpointError, match=f"config.json: {field}"):
            config_fields.check({field: value}, "config.json")


def test_an_unknown_activation_names_the_closest() -> None:
    with pytest.raises(CheckpointError, match=r'hidden_act: .gelo.*did you mean "gelu"'):
        config_fields.check_activations({"hidden_act": "gelo"}, "config.json")


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("rope", "wrong"),
    [
        (YARN, {"factor": 0}),
        (YARN, {"factor": -2.0}),
        (YARN, {"factor": True}),
        (YARN, {"factor": float("inf")}),
        (YARN, {"beta_fast": 1, "beta_slow": 32}),
        (YARN, {"beta_slow": 32}),
        (YARN, {"original_max_position_embeddings": 0}),
        (YARN, {"attention_factor": 0}),
        (LLAMA3, {"low_freq_factor": 4.0}),
        (LLAMA3, {"rope_theta": 0}),
        ({"rope_type": "longrope"}, {"short_factor": [1.0, 0.0]}),
    ],
)
def test_a_rope_without_meaning_is_named(
    name: str, rope: dict[str, Any], wrong: dict[str, Any]
) -> None:
    field = list(wrong)[-1]
    for config, path in (
        ({name: rope | wrong}, f"{name}.{field}"),
        ({name: {"full_attention": rope | wrong}}, f"{name}.full_attention.{field}"),
    ):
        with pytest.raises(CheckpointError, match=rf"config\.json: {path}: .*Accepted"):
            config_fields.check(config, "config.json")
    config_fields.check({name: rope}, "config.json")


@pytest.mark.parametrize("key", ["a", "-1", "1.0", "²"])
def test_labels_are_numbered(key: str) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: id2label: .*not the number"):
        config_fields.check({"id2label": {key: "good"}}, "config.json")
