"""A folder's settings, read here and applied by the harness, give the vectors of the library."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from optimizer.foundation.errors import CheckpointError
from optimizer.harness import tasks
from optimizer.harness.contract import Contract, TensorSpec, TokenizerSpec
from optimizer.harness.inputs.text import load_tokenizer
from optimizer.load.sentence import folder
from optimizer.recipe.schema import Model
from tests.load.conftest import edit_json
from tests.load.sentence.conftest import Save

MODES = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
TEXTS = ["a good day", "The battery was bad. " * 9, "good"]


def contract_of(saved: Path) -> Contract:
    """The contract of a saved folder, as load writes it, opened."""
    found = folder.read(saved, Model(source=str(saved), task="sentence-embedding"), 64)
    ids = ("input_ids", "attention_mask", "token_type_ids")
    return Contract(
        task="sentence-embedding",
        inputs=tuple(TensorSpec(n, "int64", ("batch", "sequence")) for n in ids),
        outputs=(TensorSpec("last_hidden_state", "float32", ("batch", "sequence", 64)),),
        tokenizer=TokenizerSpec("tokenizer.json", 24, 0, "[PAD]"),
        pooling=found.pooling,
        normalize=found.normalize,
        embedding=found.settings,
        layer_weights=found.values,
    )


def ours(saved: Path, encoder: Any, prompt: str | None = None) -> Any:
    """The harness's vectors of TEXTS from the hidden states of the library's own transformer."""
    contract = contract_of(saved).with_prompt(prompt)
    batch = tasks.encode(contract, load_tokenizer(saved, contract), TEXTS)
    with torch.no_grad():
        hidden = encoder.model(**{n: torch.from_numpy(a) for n, a in batch.items()})[0].numpy()
    values = tasks.decode(contract, {"last_hidden_state": hidden}, batch)
    width = tasks.look_up(contract).tensors(contract)["embedding"][1]
    assert values.shape[1:] == width
    return values


def theirs(saved: Path, prompt: str | None = None) -> Any:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(saved), device="cpu", local_files_only=True)
    return model.encode(TEXTS, prompt_name=prompt, show_progress_bar=False)


def alike(saved: Path, encoder: Any, prompt: str | None = None) -> None:
    values, expected = ours(saved, encoder, prompt), theirs(saved, prompt)
    scale = float(np.abs(expected).max())
    np.testing.assert_allclose(values, expected, rtol=0, atol=3e-6 * max(scale, 1))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("include_prompt", [True, False])
def test_every_pooling_is_the_librarys(
    save: Save, encoder: Any, mode: str, include_prompt: bool
) -> None:
    prompts = {"query": "this is good : "}
    saved = save(mode, include_prompt=include_prompt, prompts=prompts, default_prompt_name="query")
    alike(saved, encoder)


def test_poolings_are_joined_in_the_librarys_order(save: Save, encoder: Any) -> None:
    alike(save(("max", "cls", "mean")), encoder)


def test_flags_of_older_files_are_read(save: Save, encoder: Any) -> None:
    saved = save("mean")
    flags = {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}
    edit_json(saved / "1_Pooling/config.json", pooling_mode=None, **flags)
    assert contract_of(saved).pooling == ("cls", "mean")
    alike(saved, encoder)


@pytest.mark.parametrize("name", folder.ACTIVATIONS)
def test_every_activation_of_a_dense_layer(save: Save, encoder: Any, name: str) -> None:
    from sentence_transformers.sentence_transformer.modules import Dense

    torch.manual_seed(0)
    alike(save("mean", Dense(64, 24, activation_function=getattr(torch.nn, name)())), encoder)


@pytest.mark.parametrize("outputs", [64, 20])
def test_a_residual_layer_without_bias(save: Save, encoder: Any, outputs: int) -> None:
    from sentence_transformers.sentence_transformer.modules import Dense

    torch.manual_seed(0)
    alike(save("cls", Dense(64, outputs, bias=False, use_residual=True)), encoder)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3)))[1:])
def test_layers_run_in_the_order_of_modules_json(
    save: Save, encoder: Any, order: tuple[int, ...]
) -> None:
    from sentence_transformers.sentence_transformer.modules import Dense, LayerNorm, Normalize

    torch.manual_seed(0)
    norm = LayerNorm(64)
    torch.nn.init.normal_(norm.norm.weight)
    torch.nn.init.normal_(norm.norm.bias)
    parts = [Dense(64, 64), norm, Normalize()]
    saved = save("mean", *(parts[i] for i in order), truncate_dim=48)
    alike(saved, encoder)
    assert contract_of(saved).normalize is (order[-1] == 2)


def test_a_named_prompt_replaces_the_default_one(save: Save, encoder: Any) -> None:
    prompts = {"query": "this is : ", "other": "the other is ", "document": ""}
    saved = save("mean", prompts=prompts, default_prompt_name="query")
    for name in (None, "other", "document"):
        alike(saved, encoder, name)


def test_an_activation_that_is_not_covered(save: Save) -> None:
    from sentence_transformers.sentence_transformer.modules import Dense

    saved = save("mean", Dense(64, 8, activation_function=torch.nn.Hardswish()))
    with pytest.raises(CheckpointError, match=r"activation_function.*Hardswish.*torch.nn.Tanh"):
        contract_of(saved)


def test_the_width_before_a_dense_layer(save: Save) -> None:
    from sentence_transformers.sentence_transformer.modules import Dense

    saved = save("mean", Dense(64, 8))
    edit_json(saved / "2_Dense/config.json", in_features=32)
    with pytest.raises(CheckpointError, match=r"in_features.*32.*64, the width before it"):
        contract_of(saved)


def test_a_dense_layer_of_another_shape_than_its_config(save: Save) -> None:
    from sentence_transformers.sentence_transformer.modules import Dense

    saved = save("mean", Dense(64, 8))
    edit_json(saved / "2_Dense/config.json", out_features=9)
    with pytest.raises(CheckpointError, match=r"linear.weight' has shape \(8, 64\)"):
        contract_of(saved)
